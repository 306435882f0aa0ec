"""Configs of solo-learn's built-in methods with another `method` and its `method_kwargs`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.lab.cli.main import main
from tests import forks

ROOT = os.environ.get("SOLO_LEARN_ROOT")
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(ROOT is None, reason="SOLO_LEARN_ROOT names no checkout of main"),
]
CONFIGS = "scripts/pretrain/cifar"
HERE = (
    *("data.dataset=custom", "data.val_path=null", "data.num_workers=0", "optimizer.batch_size=16"),
    *("max_epochs=1", "+limit_train_batches=2", 'devices="1"', "accelerator=cpu", "strategy=auto"),
    *("precision=32", "sync_batchnorm=False", "wandb.enabled=False"),
)
"""48 images and no GPU; CIFAR is not fetched."""
SMALL = (
    "backbone.name=timm/resnet10t",
    "+backbone.kwargs={channels: [8, 8, 8, 8], stem_width: 8, small_stem: false}",
)
"""Instead of the ResNet-18 of these configs, which debiased and the teacher have."""
TEACHER = ("~method_kwargs.proj_output_dim", "+method_kwargs.teacher.path={teacher}")
"""The student's embeddings are as wide as the teacher's."""
RELATIVES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    # config, changes of its method_kwargs, shapes of tables
    "debiased": ("simclr", (), {}),
    "metric": ("simclr", ("+method_kwargs.loss=nt_xent_loss_func",), {}),
    "protocpc": ("simclr", (), {"prototypes.weight": (6, 256)}),
    "pcl": (
        "mocov2plus",
        ("+method_kwargs.warmup_epochs=0",),
        {
            "queues.0.value": (32768, 256),
            "prototypes.prototypes_0": (2, 256),
            "prototypes.prototypes_1": (4, 256),
            "prototypes.assignments": (2, 48),
        },
    ),
    "mochi": (
        "mocov2plus",
        ("~method_kwargs.queue_size", "+method_kwargs.mixing.warmup_epochs=0"),
        {"queues.1.value": (16, 256)},
    ),
    "nnclr_symmetric": ("nnclr", (), {"support_set.value": (65536, 256)}),
    "seed": (
        "simclr",
        (*TEACHER, "+method_kwargs.teacher_temperature=0.01"),
        {"queues.0.value": (16, 256)},
    ),
    "protoseed": ("simclr", TEACHER, {"prototypes.weight": (6, 256)}),
}


@pytest.fixture(scope="module")
def teacher(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of simclr.yaml."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train_with_ours("simclr", "simclr", folder, f"data.train_path={images}")
    return folder


def train_with_ours(config: str, method: str, folder: Path, *changes: str) -> None:
    named = ("--config-path", f"{ROOT}/{CONFIGS}", "--config-name", config)
    words = ("pretrain", *named, "--run-dir", str(folder), "--json", f"method={method}")
    assert main((*words, *HERE, *changes)) == 0


def check(folder: Path, method: str) -> None:
    (checkpoint,) = folder.glob("*.ckpt")
    found = torch.load(checkpoint, weights_only=True)
    assert found["global_step"] == 2
    shapes = RELATIVES[method][2]
    assert {name: tuple(found["state_dict"][name].shape) for name in shapes} == shapes
    kwargs = json.loads((folder / "args.json").read_text())["method_kwargs"]
    if "queues.0.value" in shapes:
        assert kwargs["queue_size"] == shapes["queues.0.value"][0]
    if method == "pcl":
        assert kwargs["num_prototypes"] == [2, 4]


@pytest.mark.parametrize("method", RELATIVES)
def test_main_pretrain(method: str, images: Path, teacher: Path, tmp_path: Path) -> None:
    config, changes, _ = RELATIVES[method]
    given = [change.format(teacher=teacher) for change in changes]
    own = (f"method={method}", f"data.train_path={images}", f"checkpoint.dir={tmp_path}")
    named = ("--config-path", f"{ROOT}/{CONFIGS}", "--config-name", f"{config}.yaml")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    network = () if method == "debiased" else SMALL
    words = (f"{ROOT}/main_pretrain.py", *named, *own, *HERE, *network, *given)
    # Lightning's own logs go to the folder too.
    done = forks.run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (tmp_path / method).iterdir()
    check(folder, method)


# What is read of such a config is the same for all; these also find sizes, or need a teacher.
@pytest.mark.parametrize("method", ["pcl", "nnclr_symmetric", "seed"])
def test_solo_ext_pretrain(
    method: str, images: Path, teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, changes, shapes = RELATIVES[method]
    given = [change.format(teacher=teacher) for change in changes]
    train_with_ours(config, method, tmp_path / "run", f"data.train_path={images}", *SMALL, *given)
    check(tmp_path / "run", method)
    open_sizes = bool(shapes) and method != "nnclr_symmetric"
    assert caplog.text.count("from 48 training images") == open_sizes
