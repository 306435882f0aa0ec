"""scikit-learn's digits as a folder of images."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from sklearn.datasets import load_digits

from solo_ext.core.errors import UserError
from solo_ext.data.digits import add_resolvers, digits_folder
from tests import forks

COUNTS = {"train": 1400, "val": 397}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent folder that holds the digits."""
    parent = tmp_path_factory.mktemp("data")
    digits_folder("train", parent)
    return parent


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.png"))


def is_whole(parent: Path) -> bool:
    """Whether the digits, and nothing else, are in ``parent``."""
    found = {split: len(files(parent / "digits" / split)) for split in COUNTS}
    return [p.name for p in parent.iterdir()] == ["digits"] and found == COUNTS


def test_counts_and_sizes(root: Path) -> None:
    assert is_whole(root)
    for split, count in COUNTS.items():
        folder = digits_folder(split, root)
        assert folder == root / "digits" / split
        per_class = Counter(p.parent.name for p in files(folder))
        assert sorted(per_class) == [str(d) for d in range(10)]
        assert sum(per_class.values()) == count
        assert split == "val" or set(per_class.values()) == {140}
        for path in files(folder):
            with Image.open(path) as image:
                assert (image.size, image.mode) == ((32, 32), "L")


def test_turned_digits(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ways of each image, all of them different, the first upright."""
    bunch = load_digits()
    few = SimpleNamespace(images=bunch.images[:20], target=bunch.target[:20])
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: few)
    folder = digits_folder("train", tmp_path, turned=True)
    assert folder == tmp_path / "digits-turned" / "train"
    assert (len(list(folder.iterdir())), len(files(folder))) == (80, 8 * 20)
    for number, digit in enumerate(few.target):
        name = f"{number:04d}.png"
        found = [np.asarray(Image.open(folder / f"{digit}-{way}" / name)) for way in range(8)]
        upright = np.asarray(Image.open(root / "digits" / "train" / str(digit) / name))
        ways = [np.rot90(x, k) for x in (upright, upright.T) for k in range(4)]
        assert all(np.array_equal(one, two) for one, two in zip(found, ways, strict=True))
        assert len({one.tobytes() for one in found}) == 8
    add_resolvers()
    with pytest.raises(Exception, match="the one word after the split is turned"):
        OmegaConf.create({"path": "${solo_ext.digits:train,turnd}"}).path  # noqa: B018


def test_images_are_scikit_learns(root: Path) -> None:
    """Every number is there once, under its class, and looks like its original."""
    bunch = load_digits()
    found = {int(p.stem): p for split in COUNTS for p in files(root / "digits" / split)}
    assert sorted(found) == list(range(1797))
    for number in range(0, 1797, 50):
        path = found[number]
        assert path.parent.name == str(bunch.target[number])
        with Image.open(path) as image:
            back = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
        original = bunch.images[number] * (255 / 16)
        assert np.corrcoef(back.ravel(), original.ravel())[0, 1] > 0.97
        assert abs(back.mean() - original.mean()) < 8


def test_root_is_the_data_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    monkeypatch.setenv("SOLO_EXT_DATA", str(root))
    assert digits_folder("val") == root / "digits" / "val"
    add_resolvers()
    add_resolvers()
    assert OmegaConf.create({"path": "${solo_ext.digits:train}"}).path == str(
        root / "digits" / "train"
    )


def test_an_interrupted_writer_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        digits_folder("train", tmp_path)
    assert not (tmp_path / "digits").exists()
    monkeypatch.undo()
    digits_folder("train", tmp_path)
    assert is_whole(tmp_path)


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "digits" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="'val'"):
        digits_folder("val", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["digits"]


def test_two_processes_write_one_folder(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from solo_ext.data.digits import digits_folder;"
        "digits_folder(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    writers = [forks.start("-c", code, split, tmp_path) for split in COUNTS]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert is_whole(tmp_path)
