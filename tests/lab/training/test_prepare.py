"""What is refused before a run starts, because it would train nothing or the wrong thing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext import host
from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import targets_of
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.conftest import MakeConfig


@pytest.mark.parametrize("devices", [2, "2"])
def test_a_batch_beyond_the_share_of_a_process(make_config: MakeConfig, devices: Any) -> None:
    """48 images: 24 for each of two processes, which a batch of 25 would not fill once."""

    def prepared(size: int, **changes: Any) -> Any:
        return prepare(make_config("simclr", optimizer={"batch_size": size}, **changes))

    prepared(25)
    prepared(24, devices=devices)
    with pytest.raises(ConfigError, match="24 images per process, 48 for 2 processes") as caught:
        prepared(25, devices=devices)
    assert (caught.value.key, caught.value.value) == ("optimizer.batch_size", 25)
    with pytest.raises(ConfigError, match="12 images per process"):
        prepared(13, devices=devices, num_nodes=2)


@pytest.mark.parametrize("dataset", ["custom", "imagenet"])
def test_a_class_that_only_one_split_has(
    make_config: MakeConfig, images: Path, tmp_path: Path, dataset: str
) -> None:
    val = Path(shutil.copytree(images, tmp_path / "val"))
    config = make_config("simclr", data={"val_path": str(val), "dataset": dataset})
    assert prepare(config).val is not None
    (val / "1").rename(tmp_path / "1")
    with pytest.raises(ConfigError, match="class '1' is missing, which would shift the labels"):
        prepare(config)
    (tmp_path / "1").rename(val / "3")
    with pytest.raises(ConfigError, match="class '3' is not among the training classes"):
        prepare(config)


def test_an_optimisers_settings_are_completed(make_config: MakeConfig) -> None:
    def completed(**kwargs: Any) -> Any:
        config = make_config(
            "simclr", optimizer={"name": "sgd", "kwargs": kwargs}, accelerator="cpu"
        )
        return prepare(config).run.optimizer.kwargs

    assert completed(nesterov=True) == {"momentum": 0.9, "nesterov": True}
    with pytest.raises(ConfigError, match=r"nesterov=true: it needs a momentum above 0"):
        completed(nesterov=True, momentum=0.0)


def test_an_optimiser_that_a_fork_has_added(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(host.BaseMethod._OPTIMIZERS, "rmsprop", torch.optim.RMSprop)  # type: ignore[attr-defined]
    config = make_config("simclr", optimizer={"name": "rmsprop", "kwargs": {"alpha": 0.9}})
    result = pretrain(prepare(config), run_dir=tmp_path / "run")
    (state,) = torch.load(result.checkpoint, weights_only=True)["optimizer_states"]
    assert {group["alpha"] for group in state["param_groups"]} == {0.9}
    with pytest.raises(ConfigError, match=r"optimizer.name='rmsprob': unknown optimiser"):
        prepare(make_config("simclr", optimizer={"name": "rmsprob"}))


CROPS = [
    {"crop_size": 16, "num_crops": 2, "rrc": {"enabled": True}},
    {"crop_size": 12, "num_crops": 2, "rrc": {"enabled": True}},
]


@pytest.mark.parametrize(
    ("method", "taken"),
    [
        ("simclr", True),
        ("nnclr", host.detect().generation == "main"),
        ("debiased", True),
        ("pcl", False),
    ],
)
def test_small_crops(method: str, taken: bool, make_config: MakeConfig) -> None:
    config = {**make_config(method), "augmentations": CROPS}
    if taken:
        assert prepare(config).cfg.data.num_small_crops == 2
    else:
        with pytest.raises(ConfigError, match=r"augmentations.*small crops"):
            prepare(config)


def test_a_queue_is_a_multiple_of_the_batch(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(make_config("nnclr", method_kwargs={"queue_size": 50}))
    assert prepared.run.method_kwargs.queue_size == 48
    assert prepared.cfg.method_kwargs.queue_size == 48
    assert "method_kwargs.queue_size: 48 instead of 50" in caplog.text


def test_processes_that_a_job_did_not_start(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would train in one, at the learning rate of two."""
    config = make_config("simclr", devices=2, strategy="ddp", optimizer={"batch_size": 24})
    # As of `sbatch --ntasks=1`, whose script starts the command without srun.
    for name, value in (("NTASKS", 1), ("NODEID", 0), ("PROCID", 0), ("LOCALID", 0)):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(ConfigError, match="devices=2: 2 processes are to train, and 1 started"):
        pretrain(prepare(config), run_dir=tmp_path / "run")


def test_without_labels_nothing_is_validated(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """Classes of validation images are none that the online classifier knows."""
    data = {"no_labels": True, "train_path": str(images / "0"), "val_path": str(images)}
    prepared = prepare(make_config("simclr", data=data, optimizer={"batch_size": 8}))
    assert prepared.val is not None
    assert set(targets_of(prepared.val)) == {-1}
    pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    assert "val_loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "sides", "expected"),
    [
        ("swin_tiny", [32], {"img_size": 32}),
        ("vit_tiny", [48, 32], {"img_size": 48, "dynamic_img_size": True}),
        ("timm/vit_tiny_patch16_224", [96], {"img_size": 96}),
        ("vit_tiny", [224], {}),
    ],
)
def test_a_transformer_takes_the_size_of_the_crops(
    make_config: MakeConfig, name: str, sides: list[int], expected: dict[str, Any]
) -> None:
    """Both of them, where a method has small crops too; a run that starts so computes at it."""
    crops = [{"crop_size": side, "num_crops": 2} for side in sides]
    backbone = {"name": name, "kwargs": {}}
    method = "simclr" if len(sides) == 1 else "protocpc"
    prepared = prepare(make_config(method, backbone=backbone, augmentations=crops))
    assert prepared.run.backbone.kwargs == expected
    assert prepared.cfg.backbone.kwargs == expected
    network = prepared.method(prepared.cfg).backbone
    for side in sides:
        assert network(torch.zeros(1, 3, side, side)).shape[0] == 1


def test_a_size_that_does_not_fit_the_crops(make_config: MakeConfig) -> None:
    backbone = {"name": "swin_tiny", "kwargs": {"img_size": 64}}
    config = make_config(
        "simclr", backbone=backbone, augmentations=[{"crop_size": 32, "num_crops": 2}]
    )
    with pytest.raises(ConfigError, match=r"crop_size=32: swin_tiny.*kwargs\.img_size=32"):
        prepare(config)
