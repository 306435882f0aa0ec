"""Hierarchical k-means beside flat, at a toy size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import hierarchical
from solo_ext.core.files import read_jsonl


def test_it_records_every_way_in_every_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    for number in range(60):
        folder = tmp_path / "images" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(256, size=(32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    images, features, file = (tmp_path / name for name in ("images", "features.pt", "found.jsonl"))
    words = f"--images {images} --features {features} --clusters 8 --rounds 2 --json {file}"
    monkeypatch.setattr("sys.argv", ["hierarchical", *words.split()])
    hierarchical.main()
    about, line, *found = read_jsonl(file)
    assert "environment" in about
    assert line["rows"] == [30, 60, 120, 240]
    assert [(r["way"], r["turn"]) for r in found] == [
        (w, t) for t in (0, 1) for w in hierarchical.WAYS
    ]
    assert all(r["objective over flat"] == 1 for r in found if r["way"] == "flat, 20")
    assert all(0.5 < r["objective over flat"] < 1.5 for r in found)
