"""E-steps of training sets that are large for k-means or for memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.metrics import normalized_mutual_info_score

from solo_ext import clustering
from solo_ext.config.check import check_method_kwargs
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import changes_numbers, checkpoints
from solo_ext.methods.e_step import _mutual_information
from solo_ext.methods.pcl import PCLKwargs
from tests.scripts import run_script

MakeConfig = Callable[..., dict[str, Any]]
Train = Callable[..., dict[str, float]]
HERE, IMAGES = Path(__file__).parent, 48
CLUSTERED: dict[str, Any] = {
    "loss": "arcface_loss_func",
    "classes": "cluster",
    "clusters": {"num_prototypes": [4], "warmup_epochs": 0},
}


class Notes(Callback):
    """Notes what every E-step was given and left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[dict[str, Any]] = []
        self.left: list[dict[str, Any]] = []
        real = clustering.e_step

        def noted(features: Any, *args: Any, **kwargs: Any) -> Any:
            self.given.append({"features": features[:].clone(), "type": type(features), **kwargs})
            return real(features, *args, **kwargs)

        monkeypatch.setattr(clustering, "e_step", noted)

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.left.append({k: v.clone() for k, v in method.prototypes.state_dict().items()})


def weights(folder: Path) -> dict[str, Any]:
    (checkpoint,) = checkpoints(folder)
    state: dict[str, Any] = torch.load(checkpoint.path, weights_only=True)["state_dict"]
    return state


def test_on_disk_the_run_is_the_same(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; the file lies where it is told to, without a name."""
    scratch = tmp_path / "scratch"
    places = {"memory": {}, "disk": {"e_step_features": "disk", "e_step_dir": str(scratch)}}
    found = {}
    for name, place in places.items():
        notes = Notes(monkeypatch)
        config = make_config("pcl", method_kwargs=place, max_epochs=3)
        folder = tmp_path / name
        pretrain(prepare(config), run_dir=folder, callbacks=[notes], show_progress=False)
        found[name] = notes, weights(folder)
    memory, disk = found["memory"], found["disk"]
    assert {g["type"].__name__ for g in memory[0].given[:3]} == {"Tensor"}
    assert {g["type"].__name__ for g in disk[0].given[:3]} == {"FeatureFile"}
    assert scratch.is_dir()
    assert not list(scratch.iterdir())
    for one, two in zip(memory[0].given[:3], disk[0].given[:3], strict=True):
        assert torch.equal(one["features"], two["features"])
    assert len(disk[0].left) == 3
    assert memory[1].keys() == disk[1].keys()
    for key, value in memory[1].items():
        assert torch.equal(value, disk[1][key]), key


@pytest.mark.parametrize("e_step", ["exact", "bank"])
def test_a_sample_is_drawn_anew_in_every_epoch(
    train: Train, monkeypatch: pytest.MonkeyPatch, e_step: str
) -> None:
    """And all images are assigned, with weights that follow their clusters."""
    notes = Notes(monkeypatch)
    settings = {**CLUSTERED["clusters"], "e_step": e_step, "e_step_sample": 20}
    logged = train("metric", notes, method_kwargs={**CLUSTERED, "clusters": settings}, max_epochs=3)
    assert [g["sample"] for g in notes.given] == [20] * 3
    assert len({g["sample_seed"] for g in notes.given}) == 3
    for given, left in zip(notes.given, notes.left, strict=True):
        (assigned,) = left["assignments"]
        differences = given["features"][:, None] - left["means_0"]
        distances = differences.norm(dim=2)
        nearest = distances.gather(1, assigned[:, None])[:, 0]
        torch.testing.assert_close(nearest, distances.amin(1), atol=1e-4, rtol=1e-4)
        assert len(assigned) == IMAGES
        # The means are those of some images only.
        of_all = torch.stack([given["features"][assigned == c].mean(0) for c in range(4)])
        assert not torch.allclose(of_all, left["means_0"], atol=1e-3)
    assert logged["e_step/objective_4"] == pytest.approx(float(nearest.square().mean()), rel=1e-3)


@pytest.mark.fault
def test_no_room_is_said_before_the_first_epoch(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = {"e_step_features": "disk", "e_step_dir": str(tmp_path / "file")}
    clusters = {**CLUSTERED["clusters"], **place}
    for name, kwargs, key in (
        ("pcl", {**place, "warmup_epochs": 1}, r"method_kwargs\.e_step_dir"),
        ("metric", {**CLUSTERED, "clusters": clusters}, r"method_kwargs\.clusters\.e_step_dir"),
    ):
        prepared = prepare(make_config(name, method_kwargs=kwargs, max_epochs=2))
        with pytest.raises(ConfigError, match=rf"{key}='.*file': .* GB in .*exists.*name a folder"):
            pretrain(prepared, run_dir=tmp_path / name, show_progress=False)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place["e_step_dir"] = "~/scratch"
    prepared = prepare(make_config("pcl", method_kwargs={**place, "warmup_epochs": 1}))
    with pytest.raises(
        ConfigError, match=r"GB in '.*/home/scratch' on .*No space left on device; make room"
    ):
        pretrain(prepared, run_dir=tmp_path / "full", show_progress=False)


def test_mutual_information_is_that_of_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(9, (500,), generator=generator)
    noise = torch.randint(30, (500,), generator=generator)
    for clusters in (labels, noise, torch.where(noise < 20, noise, labels), 0 * labels):
        expected = normalized_mutual_info_score(labels, clusters)
        assert _mutual_information(clusters, labels) == pytest.approx(expected, abs=1e-12)
    assert _mutual_information(0 * labels, 0 * labels) == 1


def test_where_embeddings_are_changes_no_numbers() -> None:
    for section in ("method_kwargs", "method_kwargs.clusters"):
        assert not changes_numbers(f"{section}.e_step_features")
        assert not changes_numbers(f"{section}.e_step_dir")
        assert changes_numbers(f"{section}.e_step_sample")
        assert changes_numbers(f"{section}.e_step")
    assert check_method_kwargs(PCLKwargs, {"e_step_sample": 7}).e_step_sample == 7


@pytest.mark.slow
@pytest.mark.fault
def test_an_error_while_one_process_embeds_ends_both(tmp_path: Path) -> None:
    """At once, with what went wrong; the other process has not even begun to cluster."""
    words = [
        *("max_epochs=1", "accelerator=cpu", "devices=2", "strategy=ddp", "data.fraction=0.2"),
        *("method_kwargs.warmup_epochs=0", "backbone.kwargs.channels=[8,8,8,8]"),
        *("optimizer.batch_size=30", "limit_train_batches=2", "data.val_path=null"),
    ]
    environment = {**os.environ, "SOLO_EXT_DATA": str(tmp_path)}
    script = HERE / "e_step_error_run.py"
    run_script(script, tmp_path, *words, environment=environment, fails=True)
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert said[1].startswith("OutOfMemoryError: of 9 GiB at ")
    assert said[0].startswith("RankError: rank 1: OutOfMemoryError: of 9 GiB at ")
    first, second = (float(text.rpartition(" ")[2]) for text in said)
    # The process group would have given up after half an hour.
    assert abs(first - second) < 60
    assert time.time() - max(first, second) < 120
