"""Whether images on disk are still the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from solo_ext.data.huggingface import HuggingFaceImages
from solo_ext.data.images import images_fingerprint, open_images
from tests.data.making import png, save_table, section, write_h5


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(images, tmp_path / "images"))


def fingerprint(folder: Path, **changes: Any) -> str:
    found = images_fingerprint(open_images(section(folder, **changes), "train"))
    assert found is not None
    return found


def names(path: Path, **changes: Any) -> str:
    found = images_fingerprint(open_images(section(path, **changes), "train"), by_name=True)
    assert found is not None
    return found


@pytest.mark.parametrize("change", ["size", "time", "new", "gone", "class"])
def test_changes_with_the_files(change: str, folder: Path) -> None:
    before = fingerprint(folder)
    assert before == fingerprint(folder)
    file = folder / "1" / "3.png"
    if change == "size":
        held = file.stat()
        file.write_bytes(file.read_bytes() + b"x")
        os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "new":
        shutil.copy2(file, folder / "1" / "99.png")
    elif change == "gone":
        file.unlink()
    else:
        (folder / "00").mkdir()
        shutil.copy2(file, folder / "00" / "0.png")
        shutil.rmtree(folder / "0")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("changes", [{}, {"fraction": 0.5}, {"holdout": 0.5}], ids=str)
def test_images_that_may_be_skipped(changes: dict[str, Any], folder: Path) -> None:
    """Their names are known; which features they have is not, so these are not stored."""
    given = {**changes, "unreadable": "skip"}
    skipping = names(folder, **given)
    assert skipping == names(folder, **given) != names(folder, **changes)
    images = open_images(section(folder, **given), "train")
    assert images_fingerprint(images) is None
    for file in sorted((folder / "1").iterdir()):
        file.rename(file.with_name(f"other-{file.name}"))
    assert names(folder, **given) != skipping


@pytest.mark.parametrize("skip", ["refuse", "skip"])
def test_one_file_of_many_images_without_labels(skip: str, tmp_path: Path) -> None:
    path, given = tmp_path / "data.h5", {"format": "h5", "no_labels": True, "unreadable": skip}
    write_h5(path, [png(1), png(2)])
    before = names(path, **given)
    assert before == names(path, **given) != names(path, **given | {"no_labels": False})
    write_h5(path, [png(1), png(2), png(3)])
    assert names(path, **given) != before


def test_a_list_may_name_both_kinds_of_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Itself named by a relative path; it is the same list wherever it is read from."""
    lines = [f"1/3.png a\n{folder}/2/4.png b\n", f"1/3.png a\n{folder}/2/5.png b\n"]
    monkeypatch.chdir(folder.parent)
    found = []
    for text in lines:
        (folder / "list.txt").write_text(text)
        relative = Path(folder.name) / "list.txt"
        assert names(relative) == names(folder / "list.txt")
        found.append(names(relative))
    assert found[0] != found[1]


def test_a_copy_elsewhere_has_the_same_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    monkeypatch.chdir(copy)
    assert names(folder) == names(copy) == names(Path())
    (copy / "1" / "3.png").rename(copy / "1" / "33.png")
    assert names(folder) != names(copy)


def test_names_need_not_be_utf8(folder: Path) -> None:
    before = fingerprint(folder)
    odd = os.fsencode(folder / "1") + b"/\xff.png"
    with open(odd, "wb") as file:
        file.write((folder / "1" / "3.png").read_bytes())
    assert fingerprint(folder) != before


@pytest.mark.parametrize(("kind", "write"), [("h5", write_h5), ("huggingface", save_table)])
def test_files_of_many_images(kind: str, write: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(path, [png(level) for level in (1, 2, 3, 4)])
    first, half = fingerprint(path, format=kind), fingerprint(path, format=kind, fraction=0.5)
    assert first == fingerprint(path, format=kind) != half
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    write(path, [png(level) for level in (1, 2, 3, 5)])
    assert fingerprint(path, format=kind) != first


def test_rows_that_are_paths_tell_nothing(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(folder / "1" / "3.png")], "label": [0]}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(2)})
    made = datasets.Dataset.from_dict(rows, kinds)
    assert images_fingerprint(HuggingFaceImages(made, "x")) is None
