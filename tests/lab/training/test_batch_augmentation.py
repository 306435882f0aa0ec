"""Training with the crops made on the training device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor

from solo_ext.core.errors import UserError
from tests.conftest import MakeConfig
from tests.lab.training.same_run import train

VIEWS = {
    "rrc": {"crop_min_scale": 0.3},
    "color_jitter": {"prob": 0.8, "brightness": 0.4, "saturation": 0.2, "hue": 0.1},
    "gaussian_blur": {"prob": 0.5},
    "horizontal_flip": {"prob": 0.5},
}
LARGE = {**VIEWS, "crop_size": 16, "num_crops": 2}
ONE = {**LARGE, "num_crops": 1}
ON_BATCH: dict[str, Any] = {"data": {"augmentation": "batch"}, "augmentations": [LARGE]}
MULTI = {**ON_BATCH, "augmentations": [LARGE, {**VIEWS, "crop_size": 8, "num_crops": 2}]}


class Seen(Callback):
    """Keeps the batches that a method gets."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self.batches.append(batch)


def served(config: dict[str, Any], run_dir: Path) -> list[Any]:
    seen = Seen()
    train(config, run_dir, callbacks=[seen])
    return seen.batches


def by_sample(batches: list[Any]) -> dict[tuple[int, int], list[Tensor]]:
    """Crops by epoch, as far as samples repeat, and sample."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for indices, crops, _ in batches:
        for place, sample in enumerate(indices.tolist()):
            epoch = sum((e, sample) in found for e in range(9))
            found[epoch, sample] = [crop[place] for crop in crops]
    return found


@pytest.mark.parametrize(("method", "changes"), [("pcl", ON_BATCH), ("protocpc", MULTI)])
def test_trains(
    method: str, changes: dict[str, Any], make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """Of methods with an E-step and with small crops; a built-in is below."""
    kwargs = {"e_step": "exact"} if method == "pcl" else {}
    config = make_config(method, **changes)
    config["method_kwargs"] |= kwargs
    config["data"]["val_path"] = str(images)
    config["max_epochs"] = 2
    batches = served(config, tmp_path / "run")
    assert len(batches) == 4
    for indices, crops, targets in batches:
        assert indices.shape == targets.shape == (24,)
        sizes = [16, 16] if changes is ON_BATCH else [16, 16, 8, 8]
        assert [tuple(c.shape) for c in crops] == [(24, 3, s, s) for s in sizes]
        assert all(c.dtype == torch.float32 for c in crops)
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in log
    assert "val_acc1" in log


@pytest.mark.slow
def test_views_do_not_depend_on_batches_workers_or_memory(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    held: list[dict[str, Any]] = [{"in_memory": True}, {"in_memory": "device"}]
    settings = (({}, 24), ({"num_workers": 2}, 24), *((data, 24) for data in held), ({}, 16))
    runs = []
    for place, (data, batch) in enumerate(settings):
        config = make_config("simclr", **ON_BATCH, max_epochs=2)
        config["data"] |= data
        config["optimizer"]["batch_size"] = batch
        runs.append(by_sample(served(config, tmp_path / str(place))))
    for run in runs[1:]:
        assert run.keys() == runs[0].keys()
        for key, crops in run.items():
            for one, other in zip(crops, runs[0][key], strict=True):
                torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    first = runs[0]
    assert not torch.equal(first[0, 5][0], first[1, 5][0])
    for run in runs[1:4]:
        assert all(torch.equal(a, b) for key in run for a, b in zip(run[key], first[key]))  # noqa: B905


@pytest.mark.parametrize(("augmentation", "name"), [("image", "mixup"), ("batch", "cutmix")])
def test_mixed_views(augmentation: str, name: str, make_config: MakeConfig, tmp_path: Path) -> None:
    """Of the same crops as without, with another image of the batch."""
    data = {"augmentation": augmentation}
    plain = served(make_config("simclr", data=data, augmentations=[LARGE]), tmp_path / "plain")
    data["mix"] = {"name": name, "min_share": 0.8}  # type: ignore[assignment]
    mixed = served(make_config("simclr", data=data, augmentations=[LARGE]), tmp_path / "mixed")
    for one, other in zip(plain, mixed, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[2], other[2])
        for view, changed in zip(one[1], other[1], strict=True):
            assert not torch.equal(view, changed)
            # Nearer to itself than to any other image.
            nearest = torch.cdist(changed.flatten(1), view.flatten(1)).argmin(1)
            assert nearest.tolist() == list(range(24))


def test_half_precision(make_config: MakeConfig, tmp_path: Path) -> None:
    """Crops arrive as what the network is; what chance decides is drawn before."""
    # A CPU does not write all gradients in bf16 where maps have one pixel.
    given = {**ON_BATCH, "augmentations": [{**LARGE, "crop_size": 32}]}
    exact = served(make_config("simclr", **given), tmp_path / "exact")
    rounded = served(make_config("simclr", **given, precision="bf16-true"), tmp_path / "half")
    for one, other in zip(exact, rounded, strict=True):
        for view, half in zip(one[1], other[1], strict=True):
            assert half.dtype == torch.bfloat16
            assert torch.equal(view.bfloat16(), half)


def test_debug_augmentations(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(make_config("simclr", **ON_BATCH, debug_augmentations=True), tmp_path / "run")
    assert "BatchAugment" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_another_size_end_the_run_with_a_line(
    workers: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for number in range(96):
        place = tmp_path / "images" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        side = 20 if number == 91 else 16
        pixels = rng.integers(0, 256, (side, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    data = {"augmentation": "batch", "num_workers": workers, "train_path": str(tmp_path / "images")}
    config = make_config("simclr", data=data, augmentations=[LARGE])
    with pytest.raises(UserError, match=r"^data.augmentation='batch': image .*91.png' has 16 x 20"):
        train(config, tmp_path / "run")
