"""E-steps of training sets that are large for k-means, and of several processes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext import clustering
from solo_ext.core.errors import UserError
from solo_ext.methods.e_step import EStepKwargs
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
            self.given.append({"features": features.clone(), **kwargs})
            return real(features, *args, **kwargs)

        monkeypatch.setattr(clustering, "e_step", noted)

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.left.append({k: v.clone() for k, v in method.prototypes.state_dict().items()})


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


def files_in(folder: Path) -> list[str]:
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line]


@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_features_lie_in_a_file_that_has_no_name(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str
) -> None:
    """So that nothing of it stays, however the E-step ends."""
    real, seen, folder = clustering.e_step, list[Any](), tmp_path / "new" / "disk"

    def noted(features: Any, *args: Any, **kwargs: Any) -> Any:
        (line,) = files_in(folder)
        begin, end = (int(place, 16) for place in line.split()[0].split("-"))
        assert begin <= features.data_ptr() < end
        assert features.norm(dim=1).allclose(torch.ones(IMAGES))
        seen.append((line, os.listdir(folder)))
        if ends != "well":
            raise ValueError("of k-means")
        return real(features, *args, **kwargs)

    monkeypatch.setattr(clustering, "e_step", noted)
    settings = {**CLUSTERED["clusters"], "features_dir": str(folder)}
    kwargs = {**CLUSTERED, "clusters": settings}
    if ends == "well":
        train("metric", method_kwargs=kwargs, max_epochs=2)
    else:
        with pytest.raises(UserError, match="ValueError: of k-means"):
            train("metric", method_kwargs=kwargs)
    assert len(seen) == (2 if ends == "well" else 1)
    for line, names in seen:
        assert line.endswith("(deleted)")
        assert names == []
    gc.collect()
    assert files_in(folder) == os.listdir(folder) == []


def test_no_name_is_no_folder() -> None:
    """A variable that is not set would else mean the folder in which the run was started."""
    with pytest.raises(ValueError, match="features_dir"):
        EStepKwargs(features_dir="")


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
