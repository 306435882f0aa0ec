"""``solo-ext embed`` beside a plain loop, at a toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import embed
from solo_ext.core.files import read_jsonl
from tests.conftest import made_images


def test_it_records_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, file = made_images(tmp_path / "images"), tmp_path / "found.jsonl"
    words = f"--data {images} --workers 0 --rounds 2 --json {file} --networks"
    monkeypatch.setattr("sys.argv", ["embed", *words.split(), "pixels of 16 x 16"])
    embed.main()
    about, *rows = read_jsonl(file)
    assert "environment" in about
    assert [row["way"] for row in rows] == ["plain loop", "plain loop again", "embed"]
    assert {row["images"] for row in rows} == {48}


def test_it_measures_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.jsonl"
    words = f"--memory 500 --dim 16 --json {file}"
    monkeypatch.setattr("sys.argv", ["embed", *words.split()])
    embed.main()
    _, row = read_jsonl(file)
    assert row["rows"] == 500
    assert row["file_bytes"] > 500 * 16 * 4 * 0.8
    assert 1e6 < row["own_bytes"] < row["resident_bytes"]
