"""Images as tensors: held or decoded, the same; of one size, or refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import datasets

from solo_ext.config.schema import Augmentation, RunConfig
from solo_ext.core.errors import ConfigError
from solo_ext.data import views
from solo_ext.data.images import open_images
from solo_ext.data.loaders import HeldLoader, ResumableLoader, eval_batches
from solo_ext.data.reading import Images, UnreadableImage, targets_of
from solo_ext.data.views import (
    EpochSampler,
    HeldBatches,
    RawBatch,
    RawBatches,
    SampleKey,
    TrainingViews,
    raw_batches,
)
from tests.data.making import opened, same, section

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Images]:
    """``folder(count, odd=None)``: class folders of 8 x 6 images, one of them 8 x 8."""

    def make(count: int = COUNT, odd: int | None = None) -> Images:
        rng = np.random.default_rng(0)
        for number in range(count):
            place = tmp_path / str(number * 2 // count)
            place.mkdir(exist_ok=True)
            side = 8 if number == odd else 6
            array = rng.integers(0, 256, (side, 8, 3), dtype=np.uint8)
            Image.fromarray(array).save(place / f"{number:03d}.png")
        return open_images(section(tmp_path), "train")

    return make


def expected(images: Images, samples: list[int]) -> tuple[list[int], torch.Tensor, list[int]]:
    items = [images[s] for s in samples]
    arrays = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image, _ in items]
    return samples, torch.stack(arrays), [target for _, target in items]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_folders(folder: Callable[..., Images], in_memory: bool, part: bool) -> None:
    images: Any = folder()
    images = Subset(images, [1, 4, 7, 9, 10]) if part else images
    read = raw_batches(images, in_memory)
    assert (read.height, read.width) == (6, 8)
    assert isinstance(read, HeldBatches) == in_memory
    samples = [3, 0, 4]
    indices, taken, targets = read.read(samples)
    wanted = expected(images, samples)
    assert (indices.tolist(), targets.tolist()) == (wanted[0], wanted[2])
    assert taken.is_contiguous()
    assert torch.equal(taken, wanted[1])


def without_archive(kind: Any, count: int = COUNT, classes: int = COUNT) -> Any:
    """A data set without the archive that its class would open."""
    made = kind.__new__(kind)
    stl = kind is datasets.STL10
    shape = (count, 3, 9, 9) if stl else (count, 9, 9, 3)
    made.data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    made.transform = made.target_transform = None
    targets = np.arange(count) % classes
    setattr(made, *(("labels", targets) if stl else ("targets", targets.tolist())))
    return made


@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.CIFAR100, datasets.STL10])
@pytest.mark.parametrize("part", [False, True])
def test_arrays_of_torchvision_are_not_copied(kind: Any, part: bool) -> None:
    images = without_archive(kind)
    subset: Any = Subset(images, [2, 5, 7, 11]) if part else images
    read = raw_batches(subset, in_memory=False)
    assert isinstance(read, HeldBatches)
    assert isinstance(read.pixels, np.ndarray)
    assert np.shares_memory(read.pixels, images.data)
    indices, taken, targets = read.read([3, 0])
    wanted = expected(subset, [3, 0])
    assert (indices.tolist(), targets.tolist()) == (wanted[0], wanted[2])
    assert torch.equal(taken, wanted[1])


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("kind", ["folders", datasets.CIFAR10])
def test_on_a_device_they_are_the_same(
    kind: Any, part: bool, device: str, folder: Callable[..., Images]
) -> None:
    images: Any = folder() if kind == "folders" else without_archive(kind)
    images = Subset(images, [2, 5, 7, 11]) if part else images
    order = EpochSampler(len(images), 0)
    held, moved = (raw_batches(images, in_memory=True) for _ in range(2))
    assert isinstance(held, HeldBatches)
    assert isinstance(moved, HeldBatches)
    moved.move(torch.device(device), always=True)
    assert moved.read([1, 0])[1].device.type == device
    expected, found = (list(HeldLoader(x, order, 2)) for x in (held, moved))
    assert len(expected) == len(images) // 2
    assert same([[x.cpu() for x in batch[1:]] for batch in found], [b[1:] for b in expected])
    assert same(expected, list(ResumableLoader(held, order, 2, 0)))


def test_what_a_device_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is moved unasked."""
    held = HeldBatches([], np.zeros((4, 3, 8, 8), dtype=np.uint8), [0] * 4)
    cpu = torch.device("cpu")
    held.move(cpu, always=False)
    assert isinstance(held.pixels, np.ndarray)
    monkeypatch.setattr(views, "_MOST_BYTES", 4 * 3 * 64 - 1)
    message = r"data\.in_memory='device': the images take 0\.0 GiB, and 0\.0 are free; take true"
    with pytest.raises(ConfigError, match=message):
        held.move(cpu, always=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("side", "share", "expected"), [(96, 1, True), (97, 1, False), (8, 0, 0)])
def test_what_a_gpu_keeps_unasked(
    side: int, share: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "DEVICE_SHARE", share)
    held = HeldBatches([], np.zeros((4, 3, side, side), dtype=np.uint8), [0] * 4)
    held.move(torch.device("cuda"), always=False)
    assert held.read([1])[1].is_cuda == expected
    if expected:
        torch.cuda.set_sync_debug_mode("error")
        try:
            held.read([2])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(16, 16), (20, 27), (12, 10)])
def test_fixed_views_from_memory_are_those_of_files(shape: tuple[int, int]) -> None:
    """To the bit, whether their size fits or not; an image may stand in for another."""
    array = np.random.default_rng(0).integers(0, 256, (COUNT, 3, *shape), dtype=np.uint8)
    rows = [*range(COUNT - 1), 0]
    files: Any = [(Image.fromarray(array[row].transpose(1, 2, 0)), 0) for row in rows]
    held: Any = HeldBatches([], array, [0] * COUNT, rows)
    augmentation = Augmentation(crop_size=16, num_crops=2)
    cfg = RunConfig.model_construct(data=section(None, num_workers=0), augmentations=[augmentation])
    samples = [*range(COUNT)][::-1]
    memory, single = (
        [*eval_batches(cfg, dataset, samples, 5)] for dataset in (held, TrainingViews(files))
    )
    assert [len(batch) for batch in memory] == [5, 5, 2]
    assert same(memory, single)


def test_sizes_that_differ_are_refused_when_met(folder: Callable[..., Images]) -> None:
    images = folder(60, odd=58)
    message = r"^data.augmentation='batch': image '.*058.png' has 8 x 8 pixels, the first 8 x 6"
    with pytest.raises(UnreadableImage, match=message):
        raw_batches(images, in_memory=True)
    batches = raw_batches(images, in_memory=False)
    assert isinstance(batches.__getitems__([SampleKey(0, 3), SampleKey(0, 4)]), RawBatch)


def test_more_than_memory_should_hold_is_refused(
    folder: Callable[..., Images], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = folder()
    wide = SimpleNamespace(size=(50_000, 5_000))
    with monkeypatch.context() as patch:
        patch.setattr(views, "read_sample", lambda *_: (0, (wide, 0)))
        patch.setattr(RawBatches, "read", None)
        with pytest.raises(ConfigError, match=r"takes 8\.4 GiB per process; take false") as caught:
            raw_batches(images, in_memory=True)
    assert caught.value.key == "data.in_memory"
    monkeypatch.setattr(views, "_MOST_BYTES", COUNT * 3 * 6 * 8)
    assert isinstance(raw_batches(images, in_memory=True), HeldBatches)


@pytest.mark.parametrize(
    "given", [{"fraction": 0.5, "holdout": 0.2}, {"fraction": 0.4, "no_labels": True}]
)
def test_a_part_stays_an_array(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(self: Any, root: str, train: bool) -> None:
        self.__dict__ |= vars(without_archive(datasets.CIFAR10, 40, classes=2))

    monkeypatch.setattr(datasets.CIFAR10, "__init__", found)
    part = opened(tmp_path, dataset="cifar10", **given)
    assert set(targets_of(part)) == ({-1} if given.get("no_labels") else {0, 1})
    read = raw_batches(part, in_memory=False)
    assert isinstance(read, HeldBatches)
    assert read.read(range(16))[2].tolist() == [part[i][1] for i in range(16)]
    wanted = np.stack([np.asarray(part[i][0]) for i in range(len(part))])
    assert len(part) == 16
    assert np.array_equal(read.read(range(16))[1].numpy(), wanted.transpose(0, 3, 1, 2))


@pytest.mark.fault
def test_a_killed_worker_changes_no_batch(folder: Callable[..., Images]) -> None:
    images = folder()
    batches = raw_batches(images, in_memory=False)
    expected = list(ResumableLoader(batches, EpochSampler(COUNT, 0), 1, 0))
    others, served = set(multiprocessing.active_children()), []
    for batch in ResumableLoader(batches, EpochSampler(COUNT, 0), 1, 1):
        served.append(batch)
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
    assert same(served, expected)
