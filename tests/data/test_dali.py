"""DALI's fixed views against torchvision's, and files that are no images."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from solo_ext.config.schema import DALI, Backbone, Batch, CommonConfig, Crop
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data import dali
from solo_ext.data.dali import DALIViews
from solo_ext.data.images import open_images
from solo_ext.data.loaders import eval_batches, fixed_loader, training_set
from tests.data.making import section

pytest.importorskip("nvidia.dali")
SIZES = [(20, 30), (37, 24), (16, 16), (12, 40), (55, 55), (31, 33), (9, 9)]


def smooth(width: int, height: int, number: int) -> Image.Image:
    """A picture with edges and slopes, not noise: what the two differ in is rounding."""
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(x / 5 + number), np.cos(y / 7), (x // 6 + y // 5 + number) % 2]
    return Image.fromarray((127 + 120 * np.stack(planes, -1)).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files of many shapes in two classes, and two that are grey or rotated by a tag."""
    root = tmp_path_factory.mktemp("jpegs")
    for number, (width, height) in enumerate(SIZES):
        place = root / str(number % 2)
        place.mkdir(exist_ok=True)
        smooth(width, height, number).save(place / f"{number}.jpg", quality=90)
    smooth(30, 21, 7).convert("L").save(root / "0" / "grey.jpg")
    tag = Image.Exif()
    tag[0x0112] = 6
    smooth(30, 21, 8).save(root / "1" / "rotated.jpg", exif=tag)
    smooth(25, 40, 9).save(root / "1" / "picture.png")
    return root


def config(folder: Path, form: str, size: int = 16, workers: int = 0) -> CommonConfig:
    return CommonConfig(
        backbone=Backbone(name="resnet18"),
        data=section(folder, format=form, num_workers=workers),
        dali=DALI(device="cpu"),
        optimizer=Batch(batch_size=4),
        augmentations=[Crop(crop_size=size)],
    )


@pytest.mark.parametrize("size", [8, 16, 28, 40])
def test_equals_the_transform_of_evaluation(folder: Path, size: int) -> None:
    images = open_images(config(folder, "dali").data, "val")
    ours = list(fixed_loader(config(folder, "dali", size), images))
    theirs = list(fixed_loader(config(folder, "image_folder", size), images))
    assert [len(t) for _, t in ours] == [len(t) for _, t in theirs] == [4, 4, 2]
    for (views, targets), (expected, labels) in zip(ours, theirs, strict=True):
        assert torch.equal(targets, labels)
        assert targets.dtype == labels.dtype
        assert views.shape == expected.shape
        # In grey levels of 255; ImageNet's standard deviations are 0.224 to 0.229.
        off = (views - expected).abs() * 0.229 * 255
        assert off.mean() < 0.4
        assert off.max() < 8


def test_e_step_reads_the_samples_it_asks_for(folder: Path) -> None:
    """As from solo-learn's own script, whose DALI loader has no data set."""

    class Trainer:
        train_dataloader = iter(())

    cfg = config(folder, "dali")
    dataset = training_set(Trainer(), cfg)
    wanted = [7, 2, 9, 4, 0]
    found = eval_batches(cfg, dataset, wanted, 3)
    expected = eval_batches(config(folder, "image_folder"), dataset, wanted, 3)
    for view, other in zip(found, expected, strict=True):
        assert ((view - other).abs() * 0.229 * 255).mean() < 0.4


BAD = {
    "truncated.jpg": lambda whole: whole[: len(whole) // 2],
    "empty.jpg": lambda whole: b"",
    "text.jpg": lambda whole: b"this is no image\n" * 20,
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", BAD)
def test_names_a_file_that_is_no_image(tmp_path: Path, name: str, threads: int) -> None:
    """Far into the pass, with good files before and after; and at once."""
    files = [tmp_path / f"{number:02d}.jpg" for number in range(20)]
    for number, file in enumerate(files):
        smooth(20, 20, number).save(file)
    bad = tmp_path / name
    bad.write_bytes(BAD[name](files[0].read_bytes()))
    for place in (13, 0, 20):
        listed = [str(file) for file in files]
        listed.insert(place, str(bad))
        views = DALIViews(config(tmp_path, "dali", workers=threads), listed, range(21), 4)
        begin = time.monotonic()
        with pytest.raises(UserError, match=name) as caught:
            list(views)
        assert time.monotonic() - begin < 60, "a hang"
        assert "\n" not in str(caught.value)
        assert "data.format=image_folder" in str(caught.value)


def test_says_how_to_install_dali(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali.importlib.util, "find_spec", lambda name: None)
    images = open_images(config(folder, "dali").data, "val")
    skipping = config(folder, "dali")
    skipping.data.unreadable = "skip"
    with pytest.raises(ConfigError, match="DALI stops at an image"):
        fixed_loader(skipping, images)
    with pytest.raises(ConfigError, match=r"not installed.*dali-cuda12.*dali-cuda13"):
        fixed_loader(config(folder, "dali"), images)


def test_refuses_a_gpu_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images = open_images(config(folder, "dali").data, "val")
    for on_gpu in (DALI(), None):
        with pytest.raises(ConfigError, match=r"dali\.device='gpu'.*dali\.device=cpu"):
            fixed_loader(config(folder, "dali").model_copy(update={"dali": on_gpu}), images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_the_cpu(folder: Path) -> None:
    images = open_images(config(folder, "dali").data, "val")
    cfg = config(folder, "dali")
    on_gpu = fixed_loader(cfg.model_copy(update={"dali": DALI(device="gpu")}), images)
    for (views, targets), (expected, labels) in zip(on_gpu, fixed_loader(cfg, images), strict=True):
        assert views.device.type == "cuda"
        assert torch.equal(targets.cpu(), labels)
        assert ((views.cpu() - expected).abs() * 0.229 * 255).mean() < 2
