"""Unreadable images: refused by name, or passed over with the same result for any loader."""

from __future__ import annotations

import itertools
import os
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Augmentation, RunConfig
from solo_ext.core.files import read_jsonl
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.images import class_names, open_images
from solo_ext.data.loaders import (
    FixedLoader,
    ResumableLoader,
    eval_batches,
    fixed_loader,
    pretrain_loader,
)
from solo_ext.data.reading import (
    MAX_CONSECUTIVE_UNREADABLE,
    SkipUnreadable,
    UnreadableImage,
    name_of,
    read_sample,
    targets_of,
)
from solo_ext.data.views import EpochSampler, FixedViews, SampleKey, TrainingViews
from solo_ext.lab.training.watch import add_lines
from tests.data.making import epochs, run_of, same, save_image, section

PER_CLASS, BATCH = 8, 4
SIZE = 3 * PER_CLASS
BROKEN = (2, 7, 8, 9, 23)
"""Among them the last and first of classes, and the last of all."""
NEXT = {2: 3, 7: 10, 8: 10, 9: 10, 23: 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of three classes, five of which cannot be read."""
    root = tmp_path_factory.mktemp("images")
    for index in range(SIZE):
        path = root / "abc"[index // PER_CLASS] / f"{index:02d}.png"
        save_image(path, index, side=8)
        if index in BROKEN:
            path.write_bytes(b"no image" if index % 2 else b"")
    return root


def config(folder: Path, policy: str = "skip", workers: int = 0, **given: Any) -> RunConfig:
    chance = {"prob": 0.5}
    augmentation = Augmentation(crop_size=8, num_crops=2, horizontal_flip=chance)  # type: ignore[arg-type]
    data = section(folder, num_workers=workers, unreadable=policy, **given)
    return run_of(data, BATCH, augmentation)


def loader_of(cfg: RunConfig) -> ResumableLoader:
    return pretrain_loader(cfg, open_images(cfg.data, "train"))


@pytest.mark.fault
def test_the_next_readable_sample_stands_in(folder: Path) -> None:
    cfg = config(folder)
    images = open_images(cfg.data, "train")
    assert isinstance(images, SkipUnreadable)
    assert class_names(images) == ["a", "b", "c"]
    assert targets_of(images) == [0] * 8 + [1] * 8 + [2] * 8
    for index in range(SIZE):
        served, (image, target) = read_sample(images, index)
        assert served == NEXT.get(index, index)
        assert target == served // PER_CLASS
        assert np.array_equal(np.asarray(image), np.asarray(images[served][0]))
    assert name_of(images, 8) == str(folder / "b" / "08.png")
    with pytest.raises(UnreadableImage, match=r"08\.png"):
        images[8]


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["image", "batch", "batch in memory"])
def test_views_of_a_stand_in(folder: Path, kind: str) -> None:
    """Index and label are its own, its crops are not those that it has as itself."""
    cfg = config(folder, augmentation=kind.split()[0], in_memory="memory" in kind)
    views: Any = loader_of(cfg).dataset
    keys = [SampleKey(0, i) for i in (7, 8, 9, 10)]
    if kind != "image":
        batch = views.__getitems__(keys)
        assert (batch.indices.tolist(), batch.targets.tolist()) == ([10] * 4, [1] * 4)
        augment = BatchAugment("custom", cfg.augmentations, 8, 8, cfg.seed)
        crops = augment(batch.images, augment.draw(batch.epoch, batch.asked.numpy()))[0]
    else:
        assert {views[key][::2] for key in keys} == {(10, 1)}
        crops = torch.stack([views[key][1][0] for key in keys])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(crops, 2))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """Two epochs without workers."""
    return epochs(loader_of(config(folder)), 2)


@pytest.mark.fault
def test_batches_hold_true_indices_and_labels(folder: Path, expected: list[Any]) -> None:
    """The same ones with workers and after a resume."""
    loader = loader_of(config(folder))
    assert same(epochs(loader, 2), expected)
    served = torch.cat([batch[0] for batch in expected]).tolist()
    targets = torch.cat([batch[2] for batch in expected]).tolist()
    assert targets == [index // PER_CLASS for index in served]
    sampler, asked = EpochSampler(SIZE, 5), []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        asked += [key.sample for key in sampler]
    assert served == [NEXT.get(index, index) for index in asked]
    resumed = loader_of(config(folder, workers=2))
    assert same(epochs(resumed, 2, {"epoch": 0, "batches": 3}), expected[3:])
    resumed._iterator = None
    assert sorted(loader.skipped) == sorted(resumed.skipped) == list(BROKEN)


@pytest.mark.fault
@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_refused_in_one_line(folder: Path, workers: int) -> None:
    """Workers end with the error, not when it is forgotten."""
    before = set(active_children())
    loader = loader_of(config(folder, "refuse", workers))
    with pytest.raises(UnreadableImage) as caught:
        list(loader)
    first = next(key.sample for key in EpochSampler(SIZE, 5) if key.sample in BROKEN)
    path = str(folder / "abc"[first // PER_CLASS] / f"{first:02d}.png")
    assert str(caught.value).startswith(f"image {path!r} cannot be read: it is ")
    assert "\n" not in str(caught.value)
    cfg = config(folder, "refuse", workers)
    with pytest.raises(UnreadableImage, match=r"02\.png"):
        list(fixed_loader(cfg, open_images(cfg.data, "val")))
    with pytest.raises(UnreadableImage, match=r"02\.png"):
        list(eval_batches(cfg, loader.dataset, range(SIZE), 4))
    assert set(active_children()) <= before


@pytest.mark.fault
@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 0), (100, 0), (1, 2)])
def test_left_out_of_evaluation(folder: Path, batch_size: int, workers: int) -> None:
    cfg = config(folder, workers=workers)
    images = open_images(cfg.data, "val")
    loader = fixed_loader(cfg, images, batch_size=batch_size)
    for _ in range(2):
        batches = list(loader)
        assert all(len(views) == len(targets) > 0 for views, targets in batches)
        readable = [i for i in range(SIZE) if i not in BROKEN]
        targets = torch.cat([targets for _, targets in batches]).tolist()
        assert targets == [i // PER_CLASS for i in readable]
        views: Any = loader.dataset
        expected = torch.stack([views.transform(images[i][0]) for i in readable])
        assert torch.equal(torch.cat([views for views, _ in batches]), expected)
        assert loader.skipped == list(BROKEN)


@pytest.mark.fault
def test_a_pass_by_index_has_a_row_for_every_sample(folder: Path) -> None:
    cfg = config(folder)
    views = loader_of(cfg).dataset
    found = torch.cat(list(eval_batches(cfg, views, range(SIZE), 5)))
    assert len(found) == SIZE
    for index in BROKEN:
        assert torch.equal(found[index], found[NEXT[index]])
    assert not torch.equal(found[0], found[1])


MANY = MAX_CONSECUTIVE_UNREADABLE + 50


class _Broken:
    """Images of which all but some cannot be read."""

    def __init__(self, size: int, readable: tuple[int, ...] = ()) -> None:
        self.size, self.fine, self.asked = size, readable, 0

    def __len__(self) -> int:
        return self.size

    def name_of(self, index: int) -> str:
        return f"{index}.jpg"

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        if index not in self.fine:
            raise UnreadableImage(self.name_of(index), "it is empty")
        return Image.new("RGB", (8, 8)), 0


def _to_zeros(_: Any) -> Tensor:
    return torch.zeros(3, 8, 8)


@pytest.mark.fault
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (5, 0), (MANY, 0), (MANY, 2)])
def test_no_endless_search(size: int, workers: int) -> None:
    images: Any = SkipUnreadable(_Broken(size))  # type: ignore[arg-type]
    count = min(size, MAX_CONSECUTIVE_UNREADABLE)
    with pytest.raises(
        UnreadableImage, match=rf"^data.unreadable='skip': none of {count} images in a row"
    ):
        read_sample(images, size - 1)
    # Once more to say what is wrong.
    assert images.images.asked == count + 1
    with pytest.raises(UnreadableImage, match=r"skip': none of \d+ images.*\.jpg' \(it is empty"):
        list(FixedLoader(FixedViews(images, _to_zeros), 3, workers))
    views = TrainingViews(images, _to_zeros, 0)  # type: ignore[arg-type]
    with pytest.raises(UnreadableImage, match="images in a row") as caught:
        list(ResumableLoader(views, EpochSampler(size, 0), 1, workers))
    assert "\n" not in str(caught.value)


@pytest.mark.fault
def test_the_last_that_is_tried_may_be_readable() -> None:
    images: Any = SkipUnreadable(
        _Broken(MAX_CONSECUTIVE_UNREADABLE, (MAX_CONSECUTIVE_UNREADABLE - 1,))
    )  # type: ignore[arg-type]
    assert read_sample(images, 0)[0] == MAX_CONSECUTIVE_UNREADABLE - 1
    loader = FixedLoader(FixedViews(images, _to_zeros), 8)
    assert [len(targets) for _, targets in loader] == [1]
    assert loader.skipped == list(range(MAX_CONSECUTIVE_UNREADABLE - 1))


def test_names_are_written_once(tmp_path: Path) -> None:
    file = tmp_path / "unreadable.jsonl"
    add_lines(file, {"a b.jpg": "it is empty", "c\n.jpg": "it is a folder"})
    add_lines(file, {"c\n.jpg": "another", os.fsdecode(b"\xff.jpg"): "it is empty"})
    assert [(line["image"], line["reason"]) for line in read_jsonl(file)] == [
        ("a b.jpg", "it is empty"),
        ("c\n.jpg", "it is a folder"),
        (os.fsdecode(b"\xff.jpg"), "it is empty"),
    ]
