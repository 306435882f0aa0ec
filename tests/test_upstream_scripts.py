"""solo-learn's own, unmodified scripts with the plugin installed beside them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = os.environ.get("SOLO_LEARN_ROOT")
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(ROOT is None, reason="SOLO_LEARN_ROOT names no checkout of main"),
]


def script(name: str, *arguments: str, data: Path) -> str:
    assert ROOT is not None
    environment = {**os.environ, "PYTHONPATH": ROOT, "SOLO_EXT_DATA": str(data)}
    done = subprocess.run(
        [sys.executable, name, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def pretrained(method: str, scratch: Path, *overrides: str) -> Path:
    """The checkpoint folder of `main_pretrain.py --config-name solo_ext/digits/METHOD`."""
    script(
        "main_pretrain.py",
        "--config-name",
        f"solo_ext/digits/{method}",
        "accelerator=cpu",
        f"checkpoint.dir={scratch}",
        *overrides,
        data=scratch / "data",
    )
    return max((scratch / method).iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained("debiased", tmp_path_factory.mktemp("upstream"), "max_epochs=1")


@pytest.mark.parametrize("e_step", ["exact", "bank"])
def test_main_pretrain_runs_the_e_step_and_resumes(tmp_path: Path, e_step: str) -> None:
    settings = ("method_kwargs.warmup_epochs=1", f"method_kwargs.e_step={e_step}")
    first = pretrained("pcl", tmp_path, "max_epochs=2", *settings)
    (checkpoint,) = first.glob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert state["prototypes.assignments"].shape == (3, 1400)
    assert state["prototypes.assignments"].amax(1).tolist() > [15, 40, 80]
    assert state["prototypes._extra_state"][0] == 1, "the epoch of the E-step"
    again = pretrained(
        "pcl", tmp_path, "max_epochs=3", *settings, f"+resume_from_checkpoint='{checkpoint}'"
    )
    (checkpoint,) = again.glob("*ep=2.ckpt")
    resumed = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert resumed["prototypes._extra_state"][0] == 2
    assert not torch.equal(resumed["prototypes.means_0"], state["prototypes.means_0"])


def test_main_pretrain_reads_through_dali(tmp_path: Path) -> None:
    """PCL, its E-step and epochs cut short; sample indices need not be asked for."""
    pytest.importorskip("nvidia.dali")
    run = pretrained(
        "pcl",
        tmp_path,
        "max_epochs=2",
        "data.format=dali",
        "+dali.device=cpu",
        "+limit_train_batches=3",
        "method_kwargs.warmup_epochs=1",
        "backbone.name=timm/resnet10t",
        "backbone.kwargs={channels: [8,8,8,8]}",
    )
    (checkpoint,) = run.glob("*ep=1.ckpt")
    found = torch.load(checkpoint, weights_only=True)
    assert found["global_step"] == 6
    assert found["state_dict"]["prototypes.assignments"].shape == (3, 1400)
    assert json.loads((run / "args.json").read_text())["dali"] == {
        "device": "cpu",
        "encode_indexes_into_labels": True,
    }


COMBINATIONS = {
    "hard_negative": ("+method_kwargs.negatives=queue", "+method_kwargs.queue_size=300"),
    "mochi": ("method_kwargs.mixing.warmup_epochs=0",),
    "nnclr_symmetric": (),
    "metric": (
        "method_kwargs.loss=arcface_loss_func",
        "~method_kwargs.loss_kwargs",
        "method_kwargs.classes=cluster",
        "+method_kwargs.clusters={num_prototypes: [20], warmup_epochs: 0}",
    ),
}


@pytest.mark.parametrize("method", COMBINATIONS)
def test_main_pretrain_runs_and_resumes(tmp_path: Path, method: str) -> None:
    settings = COMBINATIONS[method]
    first = pretrained(method, tmp_path, "max_epochs=1", *settings)
    (checkpoint,) = first.glob("*.ckpt")
    again = pretrained(
        method, tmp_path, "max_epochs=2", *settings, f"+resume_from_checkpoint='{checkpoint}'"
    )
    (checkpoint,) = again.glob("*ep=1.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    if method == "mochi":
        assert state["queues.0._extra_state"][1] == 2 * 1400
    if method == "nnclr_symmetric":
        assert (state["support_set.indices"] >= 0).all()
    if method == "metric":
        assert state["prototypes._extra_state"][0] == 1, "the epoch of the E-step"
    assert ("momentum_backbone" in str(list(state))) == (method in ("hard_negative", "mochi"))


DISTILLED = {
    "seed": ("augmentations.0.num_crops=2",),
    "protoseed": ("augmentations.0.num_crops=2", "method_kwargs.num_prototypes=50"),
    "protocpc": (),
}


@pytest.mark.parametrize("method", DISTILLED)
def test_main_pretrain_distils_and_resumes(tmp_path: Path, folder: Path, method: str) -> None:
    """From a run of the script itself, two large crops, each its own target."""
    settings = DISTILLED[method]
    if method != "protocpc":
        settings = (*settings, f"method_kwargs.teacher.path='{folder}'")
    first = pretrained(method, tmp_path, "max_epochs=1", *settings)
    (checkpoint,) = first.glob("*.ckpt")
    again = pretrained(
        method, tmp_path, "max_epochs=2", *settings, f"+resume_from_checkpoint='{checkpoint}'"
    )
    (checkpoint,) = again.glob("*ep=1.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert not any(key.startswith("teacher.backbone") for key in state)
    if method == "seed":
        assert state["queues.0._extra_state"][1] == 2 * 1400
    else:
        assert state["prior.value"].std() > 0
        torch.testing.assert_close(
            state["prior.value"].sum(), torch.tensor(50.0 if method == "protoseed" else 256.0)
        )


def test_main_pretrain_takes_the_keys_of_our_augmentation(tmp_path: Path) -> None:
    """It reads none of them, and nothing trips over them: neither the methods nor the folder."""
    settings = (
        "+data.augmentation=batch",
        "+data.in_memory=true",
        "+data.mix={name: mixup}",
        "+augmentations.0.rand_augment={num_ops: 1}",
    )
    folder = pretrained("debiased", tmp_path, "max_epochs=1", *settings)
    assert list(folder.glob("*.ckpt"))
    assert json.loads((folder / "args.json").read_text())["data"]["augmentation"] == "batch"


def test_main_pretrain_trains(folder: Path) -> None:
    """The names are those that main_knn.py and main_umap.py look for."""
    args = json.loads((folder / "args.json").read_text())
    assert args["method"] == "debiased"
    assert args["method_kwargs"]["tau_plus"] == 0.1
    (checkpoint,) = folder.glob("*.ckpt")
    assert re.fullmatch(r"debiased-digits-.+-ep=0\.ckpt", checkpoint.name)


def test_main_linear_evaluates_with_no_missing_key(folder: Path) -> None:
    (checkpoint,) = folder.glob("*.ckpt")
    script(
        "main_linear.py",
        "--config-name",
        "solo_ext/linear/digits",
        "max_epochs=1",
        "accelerator=cpu",
        f"checkpoint.dir={folder.parent.parent / 'linear'}",
        f"pretrained_feature_extractor='{checkpoint}'",
        data=folder.parent.parent / "data",
    )
    (linear,) = (folder.parent.parent / "linear").rglob("*.ckpt")
    given = torch.load(checkpoint, weights_only=True)["state_dict"]
    used = torch.load(linear, weights_only=True)["state_dict"]
    backbone = {k: v for k, v in used.items() if k.startswith("backbone.")}
    assert backbone
    for key, value in backbone.items():
        assert torch.equal(value, given[key]), f"{key} was not loaded"


def test_our_evaluation_reads_the_folder(folder: Path) -> None:
    from solo_ext.evaluation.evaluate import evaluate

    # Its args.json holds interpolations, which are not resolved out of a file.
    digits = folder.parent.parent / "data" / "digits"
    paths = {f"{split}_path": str(digits / split) for split in ("train", "val")}
    record = evaluate(folder, "knn", {"k": [20], "data": paths})
    assert record["epoch"] == 1
    assert record["image_size"] == 32
    assert record["results"][0]["acc1"] > 20
