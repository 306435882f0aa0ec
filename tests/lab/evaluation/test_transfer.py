"""``eval transfer``: protocols on several data sets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from solo_ext.core.errors import UserError
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from tests.conftest import packed
from tests.lab.evaluation.conftest import refusal, shared

KNN: dict[str, Any] = {"protocols": ["knn"], "settings": {"knn": {"k": [3], "temperature": [0.1]}}}


@pytest.fixture
def given(digit_images: dict[str, str], images: Path, tmp_path: Path) -> dict[str, Any]:
    """Two data sets, and what the model of raw pixels needs."""
    noise = {"train_path": str(images), "val_path": str(images)}
    return {
        **shared(noise, tmp_path),
        "datasets": {"digits": digit_images, "noise": noise},
    }


def test_numbers_are_those_of_the_protocols_alone(given: dict[str, Any], tmp_path: Path) -> None:
    found = evaluate("pixels", "transfer", {**given, **KNN})["results"]
    alone = []
    for data in given["datasets"].values():
        settings = {**shared(data, tmp_path), **KNN["settings"]["knn"]}
        alone.append(evaluate("pixels", "knn", settings)["results"][0]["acc1"])
    assert [r["dataset"] for r in found] == ["digits", "noise", "mean"]
    assert [r["knn_acc1"] for r in found[:2]] == alone
    assert found[2]["knn_acc1"] == pytest.approx(sum(alone) / 2)
    assert (found[0]["classes"], found[0]["train"], found[0]["test"]) == (10, 300, 150)
    assert PROTOCOLS["transfer"].headline(found) == {"knn_acc1": found[2]["knn_acc1"]}


def test_name_that_leads_elsewhere(given: dict[str, Any]) -> None:
    settings = {**given, **KNN, "datasets": {"../a": given["data"]}}
    assert refusal("pixels", "transfer", settings).startswith("datasets")


def test_wrong_folder_is_found_before_anything_is_measured(
    given: dict[str, Any], tmp_path: Path
) -> None:
    given["datasets"]["gone"] = {"train_path": "/no/such", "val_path": "/no/such"}
    assert "no such folder" in refusal("pixels", "transfer", {**given, **KNN})
    assert not (tmp_path / "features").exists()


def part_of(digit_images: dict[str, str], root: Path, *, broken: bool = True) -> dict[str, str]:
    """Eight images of every class of both splits; with ``broken`` one of each is cut off."""
    paths = {}
    for key, source in digit_images.items():
        paths[key] = str(root / key)
        for folder in Path(source).iterdir():
            (root / key / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:8]:
                shutil.copy(file, root / key / folder.name)
        if broken:
            file = min((root / key / "3").iterdir())
            file.write_bytes(file.read_bytes()[:40])
    return paths


def test_images_that_cannot_be_read(
    given: dict[str, Any], digit_images: dict[str, str], tmp_path: Path
) -> None:
    """They do not count, and no picture has the name of another."""
    given["datasets"] = {"part": part_of(digit_images, tmp_path / "part")}
    with pytest.raises(UserError, match="cannot be read"):
        evaluate("pixels", "transfer", {**given, **KNN})
    given["data"] |= {"unreadable": "skip"}
    (row,) = evaluate("pixels", "transfer", {**given, **KNN})["results"]
    assert (row["train"], row["test"]) == (79, 79)
    line = refusal("pixels", "transfer", {**given, "protocols": ["linear_augmented"]})
    assert "needs every image" in line
    # Gaps in the run's own images do not matter.
    given["data"] = dict(given["datasets"]["part"])
    given["datasets"] = {"whole": part_of(digit_images, tmp_path / "whole", broken=False)}
    settings = {"protocols": ["neighbors"], "settings": {"neighbors": {"queries": 2, "k": 2}}}
    (row,) = evaluate("pixels", "transfer", {**given, **settings})["results"]
    assert (row["train"], row["test"]) == (80, 80)
    assert (tmp_path / "transfer" / "whole" / "neighbors.png").is_file()


def test_format_follows_the_images(
    given: dict[str, Any], digit_images: dict[str, str], tmp_path: Path
) -> None:
    """Class folders beside images in HDF5, and HDF5 as a data set to transfer to."""
    hdf5 = {
        key: str(packed(Path(path), tmp_path / f"{key}.h5")) for key, path in digit_images.items()
    }
    expected = evaluate("pixels", "transfer", {**given, **KNN})["results"][0]
    given["datasets"] = {"digits": {**digit_images, "format": "image_folder"}}
    given["data"] = {**hdf5, "format": "h5"}
    (row,) = evaluate("pixels", "transfer", {**given, **KNN})["results"]
    assert row == expected
    given |= {"data": digit_images, "datasets": {"digits": {**hdf5, "format": "h5"}}}
    (row,) = evaluate("pixels", "transfer", {**given, **KNN})["results"]
    assert row == expected


def test_data_sets_with_fewer_labels_than_others_stay_a_table(
    given: dict[str, Any], digit_images: dict[str, str], tmp_path: Path
) -> None:
    """The means are of what all of them have."""
    part = part_of(digit_images, tmp_path / "part", broken=False)
    given["datasets"] = {"digits": digit_images, "part": part}
    few = {"lowshot": {"shots": [1, 20], "fractions": [], "draws": 1}}
    found = evaluate("pixels", "transfer", {**given, "protocols": ["lowshot"], "settings": few})
    whole, small, mean = found["results"]
    assert list(whole) == list(small) == list(mean)
    assert small["lowshot_acc1_20_per_class"] is None is mean["lowshot_acc1_20_per_class"]
    assert list(PROTOCOLS["transfer"].headline([whole, small, mean])) == [
        "lowshot_acc1_1_per_class"
    ]
