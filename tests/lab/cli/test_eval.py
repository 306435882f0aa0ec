"""`solo-ext eval` from the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solo_ext import host
from solo_ext.host.backbones import build_backbone
from solo_ext.lab.cli import commands
from tests.lab.cli.conftest import document, write_run

Command = Callable[..., Any]


def test_eval_knn(own_run: Path, command: Command) -> None:
    # Overrides and options stand anywhere.
    words = ("eval", "--json", "knn", str(own_run), "k=[1,5]", "--json", "temperature=[0.1]")
    result = command(*words)
    record = document(result)
    assert record["protocol"] == "knn"
    assert [(row["k"], row["temperature"]) for row in record["results"]] == [(1, 0.1), (5, 0.1)]
    assert all(10 < row["acc1"] <= row["acc5"] <= 100 for row in record["results"])
    # The part of the training images that pretraining took, and every validation image.
    assert (record["train"]["images"], record["test"]["images"]) == (280, 397)
    assert record["epoch"] == 1
    assert json.loads((own_run / "eval_knn.json").read_text()) == record
    assert (result.err, result.noise) == ("", [])


def test_eval_shows_a_table(own_run: Path, command: Command) -> None:
    result = command("eval", "linear", str(own_run), "max_iterations=20")
    assert (result.code, result.err) == (0, "")
    assert "linear: debiased, epoch" in result.out
    record = json.loads((own_run / "eval_linear.json").read_text())
    (row,) = record["results"]
    assert set(row) == {"acc1", "acc5", "train_acc1", "weight_decay"}
    assert 10 < row["acc1"] < row["acc5"] <= 100
    assert record["settings"]["max_iterations"] == 20


def test_table_is_text_with_rounded_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup; one row of many numbers stands upright to fit a terminal."""
    rows: list[dict[str, Any]] = [
        {"name": "[/b] of [red]runs[/red]", "value": -12.3456789, "small": -0.00123456789},
        {"name": "plain", "value": 87.5, "small": None},
    ]
    commands.show(argparse.Namespace(json=False), "suite: [/b] x", rows)
    monkeypatch.setenv("COLUMNS", "60")
    wide = [{f"number_{n}_of_many": float(n) for n in range(12)}]
    commands.show(argparse.Namespace(json=False), "geometry", wide)
    shown = capsys.readouterr().out
    for text in ("suite: [/b] x", "[/b] of [red]runs[/red]", "-12.35", "-0.001235", "87.50"):
        assert text in shown
    assert "None" not in shown
    assert all(f"number {n} of many" in shown for n in range(12))


def test_record_that_cannot_be_written_is_not_lost(
    own_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("solo_ext.core.files.write_text", full)
    result = command("eval", "knn", str(own_run), "k=[3]", "--json")
    assert result.code == 2
    assert len(json.loads(result.out)["results"]) == 2
    (line,) = result.lines
    assert f"the record was not written to '{own_run}': no space left" in line


def test_eval_of_a_folder_of_main(
    command: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its args.json is the config, interpolations and all, none of which is resolved."""
    monkeypatch.setenv("IMAGES_OF_MAIN", str(images))
    backbone, _ = build_backbone(
        host.load().backbones, "resnet18", {}, method="byol", dataset="custom"
    )
    args = {
        "name": "byol-mine",
        "method": "byol",
        "backbone": {"name": "resnet18", "kwargs": {}},
        "data": {
            "dataset": "custom",
            "train_path": "${oc.env:IMAGES_OF_MAIN}",
            "val_path": "${data.train_path}",
            "format": "image_folder",
            "num_workers": 0,
            "num_classes": 3,
        },
        "augmentations": [{"crop_size": 16, "num_crops": 2, "rrc": {"enabled": True}}],
        "optimizer": {"name": "lars", "batch_size": 16, "lr": 0.3},
        "wandb_run_id": None,
    }
    write_run(tmp_path / "run", backbone, "backbone", args)
    words = ("eval", "knn", "run", "k=[1]", "temperature=[0.1]", "--json")
    refused = command(*words)
    assert (refused.code, len(refused.lines)) == (2, 1)
    assert "data.train_path='${oc.env:IMAGES_OF_MAIN}': " in refused.err
    paths = [f"data.{key}_path={images}" for key in ("train", "val")]
    record = document(command(*words, *paths))
    # The nearest neighbour of an image is itself.
    assert record["results"][0]["acc1"] == 100
    assert (record["method"], record["epoch"], record["image_size"]) == ("byol", 5, 16)


def test_process_that_only_helps_says_nothing(
    own_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = command("eval", "knn", str(own_run))
    assert (result.code, result.out, result.err) == (0, "", "")
    assert not (own_run / "eval_knn.json").exists()


def test_eval_suite(own_run: Path, command: Command) -> None:
    words = ("eval", "suite", str(own_run), "protocols=[knn,retrieval]", "knn.k=[3]")
    record = document(command(*words, "--json"))
    assert [e["protocol"] for e in record["entries"]] == ["knn", "retrieval"]
    assert {r["k"] for r in record["entries"][0]["results"]} == {3}
    assert json.loads((own_run / "eval_suite.json").read_text()) == record
    failing = ("protocols=[knn,clustering]", "clustering.k=[5000]")
    shown = command("eval", "suite", str(own_run), *failing)
    assert (shown.code, shown.err) == (1, "")
    assert "k.0=5000: the test split has 397 labelled images" in shown.out
    assert f"report  {own_run / 'eval_suite.html'}" in shown.out
    # It stays in the record, and is none of another call's.
    other = command(*words)
    assert (other.code, other.err) == (0, "")
    assert "clustering" in other.out
    Path("taken").touch()
    refused = command(*words, "out=taken")
    assert (refused.code, refused.out, len(refused.lines)) == (2, "", 1)
    assert "out='taken'" in refused.err
