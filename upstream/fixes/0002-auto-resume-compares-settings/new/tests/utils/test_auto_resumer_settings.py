import json

import pytest
from omegaconf import OmegaConf
from solo.utils.auto_resumer import AutoResumer

from ..methods.utils import gen_base_cfg


def gen_cfg():
    cfg = gen_base_cfg("mocov2plus", batch_size=2, num_classes=100, momentum=True)
    cfg.seed = 5
    cfg.method_kwargs = {"temperature": 0.2, "queue_size": 64}
    cfg.augmentations = [{"crop_size": 32, "num_crops": 2, "grayscale": {"prob": 0.2}}]
    return cfg


@pytest.fixture
def run_dir(tmp_path):
    # same as what the checkpointer leaves behind
    run_dir = tmp_path / "mocov2plus" / "offline-abc1"
    run_dir.mkdir(parents=True)
    (run_dir / "test-offline-abc1-ep=4.ckpt").touch()
    with open(run_dir / "args.json", "w") as f:
        json.dump({**OmegaConf.to_container(gen_cfg()), "wandb_run_id": "abc1"}, f)
    return run_dir


def test_resumes_the_same_run(run_dir):
    checkpoint, wandb_run_id = AutoResumer(run_dir.parent).find_checkpoint(gen_cfg())
    assert checkpoint == run_dir / "test-offline-abc1-ep=4.ckpt"
    assert wandb_run_id == "abc1"


@pytest.mark.parametrize(
    "param, value",
    [
        ("method_kwargs.temperature", 0.1),
        ("method_kwargs.symmetric", True),
        ("augmentations", [{"crop_size": 32, "num_crops": 2, "grayscale": {"prob": 0.0}}]),
        ("momentum.base_tau", 0.9),
        ("seed", 6),
    ],
)
def test_does_not_resume_another_run(run_dir, param, value):
    cfg = gen_cfg()
    OmegaConf.update(cfg, param, value)
    assert AutoResumer(run_dir.parent).find_checkpoint(cfg) == (None, None)
