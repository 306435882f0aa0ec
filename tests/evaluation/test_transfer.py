"""``eval transfer``: protocols on several data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solo_ext.errors import ConfigError
from solo_ext.evaluation.evaluate import evaluate
from solo_ext.evaluation.protocols import headline

KNN = {"protocols": ["knn"], "settings": {"knn": {"k": [3], "temperature": [0.1]}}}


@pytest.fixture
def given(digit_images: dict[str, str], images: Path, tmp_path: Path) -> dict[str, Any]:
    """Two data sets, and what the model of raw pixels needs."""
    noise = {"train_path": str(images), "val_path": str(images)}
    return {
        "data": noise,
        "datasets": {"digits": digit_images, "noise": noise},
        "out": str(tmp_path),
        "crop_size": 16,
        "num_workers": 0,
        "device": "cpu",
    }


def test_numbers_are_those_of_the_protocols_alone(
    given: dict[str, Any], digit_images: dict[str, str]
) -> None:
    found = evaluate("pixels", "transfer", {**given, **KNN})["results"]
    shared = {k: given[k] for k in ("out", "crop_size", "num_workers", "device")}
    alone = {
        name: evaluate("pixels", "knn", {**shared, "data": data, "k": [3], "temperature": [0.1]})[
            "results"
        ][0]["acc1"]
        for name, data in given["datasets"].items()
    }
    assert [r["dataset"] for r in found] == ["digits", "noise", "mean"]
    assert [r["knn_acc1"] for r in found[:2]] == list(alone.values())
    assert found[2]["knn_acc1"] == pytest.approx(sum(alone.values()) / 2)
    assert (found[0]["classes"], found[0]["train"], found[0]["test"]) == (10, 300, 150)
    assert headline("transfer", found) == {"knn_acc1": found[2]["knn_acc1"]}


def test_pictures_of_data_sets_lie_apart(given: dict[str, Any], tmp_path: Path) -> None:
    settings = {"protocols": ["neighbors"], "settings": {"neighbors": {"queries": 2, "k": 2}}}
    evaluate("pixels", "transfer", {**given, **settings})
    for name in ("digits", "noise"):
        assert (tmp_path / "transfer" / name / "neighbors.png").is_file()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"datasets": {}}, "datasets={}: not a valid value"),
        ({"datasets": {"a": {"train_path": "x"}}}, "datasets.a.val_path=null: this key is req"),
        ({"datasets": {"../a": {"train_path": "x", "val_path": "x"}}}, "datasets"),
        ({"protocols": ["knnn"]}, "protocols='knnn': not possible here; did you mean 'knn'?"),
        ({"protocols": ["transfer"]}, "protocols='transfer': not possible here"),
        ({"settings": {"linear": {}}}, "settings.linear=null: not among the protocols"),
        ({"settings": {"knn": {"kk": 1}}}, "settings.knn.kk=1: unknown key; did you mean 'k'?"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], line: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate("pixels", "transfer", {**given, **KNN, **settings})
    assert str(caught.value).startswith(line)


def test_wrong_folder_is_found_before_anything_is_measured(
    given: dict[str, Any], tmp_path: Path
) -> None:
    given["datasets"]["gone"] = {"train_path": "/no/such", "val_path": "/no/such"}
    with pytest.raises(ConfigError, match="no such folder"):
        evaluate("pixels", "transfer", {**given, **KNN})
    assert not (tmp_path / "features").exists()
