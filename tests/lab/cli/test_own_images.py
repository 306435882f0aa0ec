"""From a folder of pictures to a model, embeddings and a page, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lab.cli.conftest import Command, document
from tests.lab.training.test_own_images import TINY, draw

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """60 pictures in nested folders, one of them torn, beside what a computer leaves there."""
    places = ("", "2021/", "2021/may/", "2022/sea & <b>sun/")
    root = draw(tmp_path / "photos", [f"{places[n % 4]}{n:02}.jpg" for n in range(60)])
    (root / "2021" / "._04.jpg").write_bytes(b"Mac OS X")
    (root / "torn.jpg").write_bytes((root / "00.jpg").read_bytes()[:200])
    return root


@pytest.mark.slow
def test_the_whole_way(photos: Path, command: Command) -> None:
    small = ("max_epochs=2", "+backbone.kwargs.stem_width=8")
    done = command("pretrain", "photos", *TINY, *small, "--run-dir", "run")
    assert done.code == 0, done.err
    assert "images  61 in " in done.out
    assert "hidden files passed over: 1" in done.out
    assert "1 is unreadable" in done.out
    run = Path("run").absolute()
    for line in (f"model          {run}/", "load           ", f"page           {run}/report.html"):
        assert line in done.out
    assert f"next           solo-ext eval suite {run}" in done.out
    assert "proto_nce_loss=" in done.err
    assert "acc1" not in done.err
    assert json.loads(Path("run/unreadable.jsonl").read_text())["image"].endswith("torn.jpg")

    suite = command("eval", "suite", "run", "neighbors.queries=2")
    assert suite.code == 0, suite.err
    for measured in ("geometry", "map", "neighbors", "views", "clusters"):
        assert measured in suite.out
    assert "Left out: knn" in suite.out

    written = document(command("embed", "run", "photos", "--out", "all.parquet", "--json"))
    assert written["images"] == 60
    table = pq.read_table("all.parquet")
    embeddings = np.stack(table["embedding"].to_numpy())
    assert embeddings.shape == (60, written["features_dim"])
    assert "cluster_2" in table.column_names

    page = document(command("report", "run", "photos/2021", "--out", "may.html", "--json"))
    text = Path(page["report"]).read_text()
    assert len(text) < 10e6
    for picture in photos.glob("2021/[0-9]*.jpg"):
        assert picture.name in text
    assert "sea & <b>sun" not in Path("run/report.html").read_text()


@pytest.mark.slow
def test_what_is_asked_for_and_is_not_there(photos: Path, command: Command) -> None:
    run = ("pretrain", "photos", "--method", "simclr", *TINY, "--run-dir", "run")
    assert command(*run).code == 0
    for words, problem in (
        (("eval", "knn", "run"), "the run was trained without labels"),
        (("eval", "clusters", "run"), "it has no clusters"),
        (("embed", "run", "nowhere", "--out", "a.parquet"), "'nowhere': no such folder"),
        (("report", "run", "nowhere"), "'nowhere': no such folder"),
        (("report", "photos"), "no config.yaml in it"),
        (("pretrain", "photos", *TINY, "--run-dir", "photos/run"), "would be read with them"),
    ):
        refused = command(*words)
        assert refused.code == 2, refused.err
        assert "Traceback" not in refused.err
        assert problem in refused.lines[-1]


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_its_model_too(photos: Path, command: Command) -> None:
    """Here it is one that has more epochs to go."""
    run = ("pretrain", "photos", "--method", "simclr", *TINY, "--run-dir", "run")
    assert command(*run).code == 0
    assert "images  61 in" in Path("run/choices.txt").read_text()
    before = Path("run/model/model.safetensors").read_bytes()
    Path("run/report.html").unlink()
    again = document(command("pretrain", "--resume", "run", "max_epochs=2", "--force", "--json"))
    assert again["epochs"] == 2
    assert Path(again["report"]).is_file()
    assert Path(again["model"], "model.safetensors").read_bytes() != before
