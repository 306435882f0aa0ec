"""What a process keeps of many images, and how soon it starts; made files have the real format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rows import scale
from scripts.update_memory import LISTING, value
from solo_ext.data.folders import Listing


def test_made_listings_are_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And take what the formula says."""
    monkeypatch.setattr(scale, "CLASS", 300)
    scale.make_listing(tmp_path, 1024)
    samples = [(f"{i // 300:03d}/{i % 300:06d}.jpg", i // 300) for i in range(1024)]
    made, real = Listing.mapped(tmp_path), Listing.of(samples, ["000", "001", "002", "003"])
    assert list(made) == samples
    assert made.classes == real.classes
    for name in ("names", "starts", "targets"):
        assert np.array_equal(getattr(made, name), getattr(real, name))
    held = real.names.nbytes + real.starts.nbytes + real.targets.nbytes
    # The end of the last name comes on top.
    assert held == value(LISTING, {"n": 1024, "c": scale.NAME}) + 8


def test_ten_million_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as 2^24 are: mapped, and in a computed order."""
    monkeypatch.setattr("solo_ext.core.draws.LARGE", 10**6)
    monkeypatch.setattr(scale, "LARGE", 10**6)
    monkeypatch.setattr(scale, "COUNTS", (100, 200))
    # A share of the bank is 10 MB; the whole one would be 5 GB.
    monkeypatch.setattr(scale, "MOST_MB", 50)
    findings, details = scale.start(10**7)
    assert [f.verdict for f in findings] == ["met", "met"]
    assert len(details["start with 10,000,000 images"]) == 5


def test_more_names_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale.tempfile, "gettempdir", lambda: "/proc")
    findings, _ = scale.start(10**9)
    assert [(f.verdict, f.note) for f in findings] == [("not measured", "needs 19 GB of /proc")] * 2


def test_an_embedding_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,), _ = scale.embedded(5000)
    assert finding.measured is not None
    # Less would not hold the names.
    assert finding.measured > 1
