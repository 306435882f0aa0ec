"""Runs without labels, and runs without images to validate on: what can be measured is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from solo_ext.core.errors import ConfigError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.cli.main import main
from solo_ext.lab.evaluation import pictures
from solo_ext.lab.evaluation.context import EvalContext, open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import WITHOUT_LABELS
from solo_ext.lab.evaluation.suite import evaluate_suite
from solo_ext.lab.training.prepare import prepare
from solo_ext.memory.knn import nearest_neighbors
from tests.conftest import MakeConfig
from tests.lab.evaluation.conftest import refusal
from tests.lab.evaluation.test_label_free import SMALL, copied, flattened
from tests.lab.training.same_run import same_weights, train

QUICK: dict[str, Any] = {
    "map": {"methods": ["pca"]},
    "neighbors": {"queries": 2, "k": 3},
    "views": SMALL,
}
MEASURED = ["geometry", "map", "neighbors", "views"]


@pytest.fixture(scope="module")
def flat(images: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two flat folders: 48 images to train on, 21 others."""
    root = tmp_path_factory.mktemp("flat")
    return {
        "train_path": str(flattened(images, root / "train")),
        "val_path": str(flattened(val, root / "val")),
    }


@pytest.fixture(scope="module")
def bare(
    make_config: MakeConfig, flat: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run without labels, with images that it did not train on."""
    config = make_config("simclr", data={**flat, "no_labels": True})
    return train(config, tmp_path_factory.mktemp("bare") / "run").run_dir


def test_what_needs_no_labels_measures(bare: Path) -> None:
    geometry, pca, neighbors, views = (
        evaluate(bare, name, QUICK.get(name, {})) for name in MEASURED
    )
    assert [record["test"]["images"] for record in (geometry, pca, neighbors, views)] == [21] * 4
    assert geometry["notes"] == []
    assert geometry["results"][0]["class_alignment"] is None
    assert geometry["results"][0]["images"] == 21
    assert pca["results"][0]["images"] == 21
    assert "precision" not in neighbors["results"][0]
    assert -1 <= neighbors["results"][0]["similarity"] <= 1
    assert set(PROTOCOLS["neighbors"].headline(neighbors["results"])) == {"similarity"}
    for name in ("map_pca.png", "neighbors.png"):
        with Image.open(bare / name) as picture:
            assert picture.width > 100


def test_labels_change_no_number_of_what_needs_none(
    bare: Path, images: Path, val: Path, tmp_path: Path
) -> None:
    """Of the same images in class folders, only what is said about classes differs."""
    data = {"train_path": str(images), "val_path": str(val)}
    labelled = copied(bare, tmp_path / "run", **data, no_labels=False)
    for name in ("geometry", "map", "neighbors"):
        (with_labels,) = evaluate(labelled, name, QUICK.get(name, {}))["results"]
        (without,) = evaluate(bare, name, QUICK.get(name, {}))["results"]
        for key in with_labels.keys() & without.keys() - {"class_alignment"}:
            value = without[key]
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
            assert with_labels[key] == expected, key
    assert evaluate(labelled, "geometry")["results"][0]["class_alignment"] > 0


def test_without_held_out_images(bare: Path, tmp_path: Path) -> None:
    run = copied(bare, tmp_path / "run", val_path=None)
    record = evaluate(run, "geometry")
    note = "there is no data.val_path and no data.holdout: measured on 48 of the training images"
    assert record["notes"] == [note]
    assert record["test"]["drawn_from"] == "train"
    assert record["test"]["path"] == record["train"]["path"]
    assert record["test"]["images"] == record["train"]["images"] == 48
    assert refusal(run, "neighbors", {"k": 48}).startswith("k=48: there are 47 training images")


def test_no_image_is_a_neighbour_of_itself() -> None:
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    own = torch.tensor([3, 7, 29])
    places, similarities = nearest_neighbors(x[own], x, 4, own)
    for row, place in enumerate(own.tolist()):
        cosines = torch.nn.functional.cosine_similarity(x, x[place : place + 1])
        cosines[place] = -2
        values, found = cosines.topk(4)
        assert places[row].tolist() == found.tolist()
        assert torch.allclose(similarities[row], values, atol=1e-6)


def test_part_of_many_training_images(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solo_ext.lab.evaluation.context._DRAWN", 10)
    run = copied(bare, tmp_path / "run", val_path=None)
    first, second = (open_context(str(run), EvalRun()) for _ in range(2))
    assert first.drawn is not None
    assert second.drawn is not None
    assert first.drawn.tolist() == second.drawn.tolist()
    assert len(set(first.drawn.tolist())) == 10
    x, _ = first.features.train
    assert torch.allclose(first.features.test[0], x[first.drawn], atol=1e-5)
    for name in MEASURED:
        assert evaluate(run, name, QUICK.get(name, {}))["test"]["images"] == 10


def test_only_the_split_that_is_measured_is_read(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million training images are nothing to the geometry of two thousand."""
    asked: list[str] = []
    extract = EvalContext._features

    def spy(self: EvalContext, split: Any, images: Any) -> Any:
        asked.append(split)
        return extract(self, split, images)

    monkeypatch.setattr(EvalContext, "_features", spy)
    evaluate(bare, "geometry", {"features_dir": str(tmp_path)})
    evaluate(bare, "map", {**QUICK["map"], "features_dir": str(tmp_path)})
    assert asked == ["val", "val"]
    evaluate(bare, "views", SMALL)
    assert len(asked) == 2


def test_refused_in_one_line_that_names_others(bare: Path, run: Path, tmp_path: Path) -> None:
    named = f"take a protocol that needs no labels: {', '.join(WITHOUT_LABELS)}"
    for name, kind in PROTOCOLS.items():
        if kind.needs_labels:
            line = refusal(bare, name, {})
            assert "the run was trained without labels; give class folders" in line
            assert line.endswith(named)
    # A run with labels needs images with labels that it did not train on.
    alone = copied(run, tmp_path / "run", val_path=None)
    line = refusal(alone, "knn", {})
    assert line.startswith("data.val_path=null: no path; give the folder")
    assert line.endswith(named)
    assert evaluate(alone, "geometry")["test"]["drawn_from"] == "train"


def test_other_images_without_labels(run: Path, flat: dict[str, str]) -> None:
    line = refusal(run, "geometry", {"data": flat})
    assert "no class folders in it" in line
    assert "data.no_labels=true" in line
    found = evaluate(run, "geometry", {"data": {**flat, "no_labels": True}})
    assert found["test"]["images"] == 21
    assert found["results"][0]["class_alignment"] is None


def test_classes_of_other_images(bare: Path, images: Path, val: Path) -> None:
    data = {"train_path": str(images), "val_path": str(val)}
    assert evaluate(bare, "knn", {"data": data, "k": [1]})["results"][0]["acc1"] >= 0
    given = {"datasets": {"classes": data}, "protocols": ["knn"]}
    assert evaluate(bare, "transfer", given)["results"][0]["classes"] == 3


def test_a_suite_measures_what_is_possible(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(bare, tmp_path / "run", val_path=None)
    words = ["map.methods=[pca]", "neighbors.k=3", "neighbors.queries=2", "views.lidar_views=2"]
    assert main(["eval", "suite", str(run), *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    record = json.loads((run / "eval_suite.json").read_text())
    assert [entry["protocol"] for entry in record["entries"]] == MEASURED
    assert {entry["status"] for entry in record["entries"]} == {"done"}
    assert record["failed"] == []
    left_out = [name for name, kind in PROTOCOLS.items() if kind.by_default and kind.needs_labels]
    reasons = {entry["protocol"]: entry["reason"].split(": ")[1] for entry in record["left_out"]}
    # It is a run of SimCLR.
    assert reasons.pop("clusters") == "it has no clusters"
    assert list(reasons) == left_out
    assert set(reasons.values()) == {"the run was trained without labels"}
    page = (run / "eval_suite.html").read_text()
    for text in (shown, page):
        assert f"Left out: {', '.join(left_out)} (data.train_path=" in text
        assert "measured on 48 of the training images" in text


def test_a_suite_of_nothing_that_is_possible(bare: Path) -> None:
    with pytest.raises(ConfigError, match="needs no labels: geometry"):
        evaluate_suite(bare, {"protocols": ["knn", "linear"]})
    record = evaluate_suite(bare, {"protocols": ["knn", "geometry"]})
    assert [entry["protocol"] for entry in record["left_out"]] == ["knn"]


def test_a_suite_leaves_nothing_out_of_a_run_with_labels(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["features"])
    record = evaluate_suite(other, {"protocols": ["knn", "views"], "views": SMALL})
    assert record["left_out"] == []
    assert record["failed"] == []
    assert [entry["protocol"] for entry in record["entries"]] == ["knn", "views"]


def test_measured_while_training_and_training_left_alone(
    make_config: MakeConfig, flat: dict[str, str], tmp_path: Path
) -> None:
    """By default with what needs no labels; the numbers are those of `eval` of the checkpoint."""
    config = make_config("simclr", data={**flat, "no_labels": True}, max_epochs=2)
    plain = train(config, tmp_path / "plain").run_dir
    online = {"every_n_epochs": 1, "settings": {"views": SMALL}}
    run = train({**config, "online_eval": online}, tmp_path / "run").run_dir
    saved = json.loads((run / "args.json").read_text())["online_eval"]["protocols"]
    assert saved == ["views", "geometry"]
    lines = {r["epochs_done"]: r for r in read_jsonl(run / "metrics.jsonl") if "epochs_done" in r}
    assert sorted(lines) == [0, 1, 2]
    for name in saved:
        found = PROTOCOLS[name].headline(evaluate(run, name, QUICK.get(name, {}))["results"])
        assert found
        for key, value in found.items():
            assert lines[2][f"online_{name}_{key}"] == pytest.approx(value, rel=1e-3)
    assert same_weights(plain, run)


def test_measured_while_training_on_training_images(
    make_config: MakeConfig, images: Path, flat: dict[str, str], tmp_path: Path
) -> None:
    """Without others; also with labels, if the protocols that need none are named."""
    online = {"every_n_epochs": 1, "settings": {"views": SMALL}}
    bare = {"train_path": flat["train_path"], "val_path": None, "no_labels": True}
    labelled = {"train_path": str(images), "val_path": None}
    for place, (data, names) in enumerate(((bare, None), (labelled, ["views", "neighbors"]))):
        settings = {"neighbors": QUICK["neighbors"]} if names else {}
        given = {**online, "protocols": names, "settings": {**online["settings"], **settings}}
        config = make_config("simclr", data=data, online_eval=given)
        run = train(config, tmp_path / str(place)).run_dir
        logged = {k for r in read_jsonl(run / "metrics.jsonl") for k in r}
        assert {"online_views_rankme", "online_views_lidar"} <= logged
    config = make_config("simclr", data=labelled, online_eval={"every_n_epochs": 1})
    with pytest.raises(ConfigError, match=r"no labelled images to evaluate knn on.*geometry, map"):
        train(config, tmp_path / "refused")


def test_default_of_runs_with_labels(make_config: MakeConfig) -> None:
    assert prepare(make_config("simclr")).run.online_eval.protocols == ["knn"]


def test_neighbours_beside_unreadable_images(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown is what was compared: rows of features are fewer than images."""
    whole = flattened(images, tmp_path / "whole")
    first = min(whole.iterdir())
    first.write_bytes(b"broken")
    shown: list[str] = []
    name_of = pictures.name_of
    monkeypatch.setattr(pictures, "name_of", lambda *of: shown.append(name_of(*of)) or shown[-1])
    data = {"train_path": str(whole), "val_path": str(whole), "no_labels": True}
    given = {"data": {**data, "unreadable": "skip"}, "crop_size": 16, "num_workers": 0}
    evaluate("pixels", "neighbors", {**given, "queries": 5, "k": 2, "out": str(tmp_path)})
    # Each image is the nearest to itself, as the two splits are the same.
    assert len(shown) == 15
    assert shown[::3] == shown[1::3]
    assert str(first) not in shown


def test_a_picture_is_no_neighbour_of_itself_beside_unreadable_ones(
    bare: Path, flat: dict[str, str], tmp_path: Path
) -> None:
    """Without images of their own, those that are measured are some of training."""
    whole = Path(shutil.copytree(flat["train_path"], tmp_path / "whole"))
    min(whole.iterdir()).write_bytes(b"broken")
    data = {"train_path": str(whole), "unreadable": "skip", "no_labels": True}
    settings = EvalRun(data=data, num_workers=0)
    run = copied(bare, tmp_path / "run", val_path=None)
    context = open_context(str(run), settings)
    (bank, _), (x, _) = context.features.train, context.features.test
    own = context.own_rows()
    assert own is not None
    torch.testing.assert_close(bank[own], x)
