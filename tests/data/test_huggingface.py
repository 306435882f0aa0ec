"""Data sets of the `datasets` library, all local."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from solo_ext.config.schema import HuggingFace
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import class_names, images_fingerprint
from solo_ext.data.reading import UnreadableImage, name_of, targets_of
from tests.data import making
from tests.data.making import png, write_tar

datasets: Any = pytest.importorskip("datasets")
SIZE = 12
NAMES = ["ant", "bee", "cat"]


def rows(count: int = SIZE, *, label: Any = None, **more: Any) -> Any:
    """Returns a data set of images; the label of row i is i mod 3."""
    label = datasets.ClassLabel(names=NAMES) if label is None else label
    table = {
        "image": [{"bytes": png(i), "path": f"{i}.png"} for i in range(count)],
        "label": [i % 3 for i in range(count)],
        **{name: values for name, (_, values) in more.items()},
    }
    features = {
        "image": datasets.Image(),
        "label": label,
        **{name: kind for name, (kind, _) in more.items()},
    }
    return datasets.Dataset.from_dict(table, features=datasets.Features(features))


def folder(root: Path) -> Path:
    for index in range(SIZE):
        for split in ("train", "test"):
            place = root / split / NAMES[index % 3]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{index:02d}.png").write_bytes(png(index))
            (place / "notes.txt").write_text("no image")
    return root


def parquet(root: Path) -> Path:
    rows().to_parquet(str(root / "rows.parquet"))
    return root / "rows.parquet"


def shards(root: Path) -> Path:
    for part in range(3):
        rows().shard(3, part, contiguous=True).to_parquet(str(root / f"train-{part}-of-3.parquet"))
    return root / "train-*.parquet"


def plain_parquet(root: Path) -> Path:
    """As other programs write it, without the features of `datasets`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    held = {"img": [png(i) for i in range(SIZE)], "label": [NAMES[i % 3] for i in range(SIZE)]}
    pq.write_table(pa.table(held), root / "plain.parquet")
    return root / "plain.parquet"


def saved(root: Path) -> Path:
    rows().save_to_disk(str(root / "saved"))
    return root / "saved"


def saved_splits(root: Path) -> Path:
    splits = datasets.DatasetDict(train=rows(), validation=rows(), more=rows(3))
    splits.save_to_disk(str(root / "splits"))
    return root / "splits"


def arrow(root: Path) -> Path:
    return next(saved(root).glob("*.arrow"))


def tar(root: Path) -> Path:
    """A shard as WebDataset writes it."""
    samples = [{"png": png(index), "cls": b"%d" % (index % 3)} for index in range(SIZE)]
    return write_tar(root / "train-000.tar", samples).parent


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder of splits": folder,
    "class folder": lambda root: folder(root) / "train",
    "parquet": parquet,
    "folder of parquet": lambda root: shards(root).parent,
    "pattern of parquet": shards,
    "parquet of others": plain_parquet,
    "saved": saved,
    "saved splits": saved_splits,
    "arrow": arrow,
    "tar": tar,
}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """Opens images with caches that are of the test."""

    def images(path: Path | str, settings: dict[str, Any] | None = None, **given: Any) -> Any:
        chosen = HuggingFace(cache_dir=str(tmp_path / "cache"), **(settings or {}))
        given = {"val_path": None, "huggingface": chosen, **given}
        return making.opened(path, format="huggingface", **given)

    return images


@pytest.mark.parametrize("source", SOURCES)
def test_images_classes_and_targets(source: str, opened: Any, tmp_path: Path) -> None:
    path = SOURCES[source](tmp_path)
    images = opened(path)
    assert len(images) == SIZE
    assert class_names(images) == (["0", "1", "2"] if source == "tar" else NAMES)
    order = sorted(range(SIZE), key=lambda i: (i % 3, i)) if "folder" in source else range(SIZE)
    order = range(SIZE) if source == "folder of parquet" else order
    assert targets_of(images) == [i % 3 for i in order]
    for place, index in enumerate(order):
        image, target = images[place]
        assert (image.mode, image.size, target) == ("RGB", (6, 6), index % 3)
        assert image.getpixel((0, 0)) == (index, 2 * index, 255 - index)
    if source != "saved":
        assert name_of(images, 4)


@pytest.mark.parametrize("source", ["parquet", "saved", "folder of splits", "parquet of others"])
def test_the_table_is_not_copied(source: str, opened: Any, tmp_path: Path) -> None:
    images = opened(SOURCES[source](tmp_path), fraction=0.5)
    held = pickle.dumps(images)
    # The images are on disk: a worker is sent where.
    assert png(5)[:60] not in held
    assert len(held) < 6000
    assert sorted(targets_of(images)) == [0, 0, 1, 1, 2, 2]
    files = {Path(f["filename"]) for f in images.dataset.rows.cache_files}
    assert files
    assert all(f.is_relative_to(tmp_path) for f in files)
    copy = pickle.loads(held)
    assert np.array_equal(np.asarray(copy[3][0]), np.asarray(images[3][0]))


def test_unreadable_rows_are_named(opened: Any, tmp_path: Path) -> None:
    root = folder(tmp_path) / "train"
    (root / "ant" / "00.png").write_bytes(b"")
    images = opened(root)
    with pytest.raises(UnreadableImage, match="it is empty") as caught:
        images[0]
    assert caught.value.what == name_of(images, 0) == str(root / "ant" / "00.png")
    table = {"image": [None, {"bytes": b"no image", "path": None}], "label": [0, 1]}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    datasets.Dataset.from_dict(table, features=features).save_to_disk(str(tmp_path / "x"))
    images = opened(tmp_path / "x")
    assert (targets_of(images), class_names(images)) == ([0, 1], ["0", "1"])
    for index, reason in enumerate(("has no image", "no image of")):
        with pytest.raises(UnreadableImage, match=reason) as caught:
            images[index]
        assert caught.value.what == name_of(images, index)
        assert caught.value.what == f"{tmp_path / 'x'} [train], row {index}"


@pytest.mark.parametrize(
    ("values", "kind", "names", "targets"),
    [
        ([5, 7, 5, 9], "int64", ["5", "7", "9"], [0, 1, 0, 2]),
        ([10, 9, 100, 9], "int64", ["9", "10", "100"], [1, 0, 2, 0]),
        ([1, -1, None, 0], "int64", ["0", "1"], [1, -1, -1, 0]),
        (["b", "a", None, "b"], "string", ["a", "b"], [1, 0, -1, 1]),
    ],
)
def test_labels_that_are_no_class_labels(
    values: list[Any], kind: str, names: list[str], targets: list[int], opened: Any, tmp_path: Path
) -> None:
    held = rows(4, what=(datasets.Value(kind), values)).remove_columns("label")
    held.save_to_disk(str(tmp_path / "x"))
    images = opened(tmp_path / "x", {"label": "what"})
    assert (class_names(images), targets_of(images)) == (names, targets)
    assert [images[i][1] for i in range(4)] == targets


def test_columns_by_setting(opened: Any, tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=["x", "y"])
    place = tmp_path / "file.png"
    place.write_bytes(png(9))
    held = rows(2, fine=(kind, [1, 0]), place=(datasets.Value("string"), [str(place)] * 2))
    held.save_to_disk(str(tmp_path / "x"))
    images = opened(tmp_path / "x")
    assert class_names(images) == NAMES
    images = opened(tmp_path / "x", {"image": "place", "label": "fine"})
    assert (class_names(images), targets_of(images)) == (["x", "y"], [1, 0])
    assert images[0][0].getpixel((0, 0)) == (9, 18, 246)
    assert name_of(images, 0) == str(place)
    bare = opened(tmp_path / "x", no_labels=True)
    assert (targets_of(bare), bare[1][1]) == ([-1, -1], -1)


def test_splits(opened: Any, tmp_path: Path) -> None:
    path = saved_splits(tmp_path)
    both = {"val_path": str(path)}
    assert len(opened(path, **both, split="val")) == SIZE
    assert len(opened(path, {"val_split": "more"}, **both, split="val")) == 3
    assert len(opened(path, {"train_split": "more"}, **both)) == 3
    other = parquet(tmp_path)
    # A file of its own for validation, which `datasets` calls train.
    assert len(opened(path, val_path=str(other), split="val")) == SIZE


def kept(root: Path, column: str) -> Path:
    rows().select_columns([column]).save_to_disk(str(root / "x"))
    return root / "x"


def two_of_images(root: Path) -> Path:
    several = rows(2, b=(datasets.Image(), [{"bytes": png(1), "path": None}] * 2))
    several = several.select_columns(["image", "b", "label"]).rename_column("image", "a")
    several.save_to_disk(str(root / "x"))
    return root / "x"


def lists(root: Path) -> Path:
    integers = datasets.Sequence(datasets.Value("int64"))
    rows(2, more=(integers, [[3, 4], [5]])).save_to_disk(str(root / "x"))
    return root / "x"


Mistake = tuple[Callable[[Path], Path | str], dict[str, Any], str, str]
MISTAKES: dict[str, Mistake] = {
    "path": (lambda root: root / "no", {}, "data.train_path", "no such folder or file"),
    "file": (lambda root: "no.parquet", {}, "data.train_path", "no such folder or file"),
    "empty": (lambda root: root, {}, "data.train_path", "data files"),
    "split": (saved_splits, {"train_split": "trian"}, "train_split", "did you mean 'train'"),
    "split of one": (saved, {"train_split": "train"}, "train_split", "single split"),
    "image": (saved, {"image": "imgae"}, "image", "did you mean 'image'"),
    "label": (saved, {"label": "lable"}, "label", "did you mean 'label'"),
    "image of numbers": (saved, {"image": "label"}, "image", "no column of images, .*: image, l"),
    "image of lists": (lists, {"image": "more"}, "image", "no column of images, encoded images or"),
    "no image": (lambda root: kept(root, "label"), {}, "image", "no column of images.*: label"),
    "no label": (lambda root: kept(root, "image"), {}, "label", "no column of labels.*no_labels"),
    "several": (two_of_images, {}, "image", "several columns of images; name it; columns: a, "),
    "label of images": (saved, {"label": "image"}, "label", "neither whole numbers nor names"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind: str, opened: Any, tmp_path: Path) -> None:
    make, settings, key, problem = MISTAKES[kind]
    with pytest.raises(ConfigError, match=problem) as caught:
        opened(make(tmp_path), settings)
    assert caught.value.key.endswith(key)
    assert "\n" not in str(caught.value)


def test_training_images_are_no_validation(opened: Any, tmp_path: Path) -> None:
    path = parquet(tmp_path)
    with pytest.raises(ConfigError, match=r"val_split=null: no split named validation.*train"):
        opened(path, val_path=str(path), split="val")
    named = opened(path, {"val_split": "train"}, val_path=str(path), split="val")
    assert len(named) == SIZE


def test_names_on_the_hub(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*words: Any, **options: Any) -> Any:
        asked.append((words, options["revision"]))
        if words[0] == "nobody/nothing":
            raise ConnectionError("Couldn't reach the Hub\nand more")
        return datasets.DatasetDict(train=rows(), test=rows(3))

    monkeypatch.setattr(datasets, "load_dataset", load)
    for split, size in (("train", SIZE), ("val", 3)):
        settings = {"name": "plain", "revision": "abc"}
        images = opened("owner/set", settings, val_path="owner/set", split=split)
        assert len(images) == size
    assert asked == [(("owner/set", "plain"), "abc")] * 2
    with pytest.raises(ConfigError, match="not here, and Couldn't reach the Hub;") as caught:
        opened("nobody/nothing")
    assert caught.value.value == "nobody/nothing"


def test_without_the_package(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"datasets is not installed; pip install 'solo-ext\[hf"):
        opened("x")


def test_a_copy_of_a_table_is_known_by_its_labels(opened: Any, tmp_path: Path) -> None:
    path = Path(SOURCES["parquet"](tmp_path))
    here = opened(path)
    os.utime(path, (1, 1))
    there = opened(path)
    assert images_fingerprint(here) != images_fingerprint(there)
    assert images_fingerprint(here, by_name=True) == images_fingerprint(there, by_name=True)
    there.targets = there.targets[::-1].copy()
    assert images_fingerprint(here, by_name=True) != images_fingerprint(there, by_name=True)
