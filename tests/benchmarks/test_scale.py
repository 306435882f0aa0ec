"""What a process keeps of many images, and how soon it starts; made files have the real format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from benchmarks.footprint import formulas
from benchmarks.footprint.formulas import Sizes
from solo_ext.data.folders import Listing


def test_made_listings_are_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And take what the formula says."""
    monkeypatch.setattr(scale, "CLASS", 300)
    scale.make_listing(tmp_path, 1000)
    samples = [(f"{i // 300:03d}/{i % 300:06d}.jpg", i // 300) for i in range(1000)]
    made, real = Listing.mapped(tmp_path), Listing.of(samples, ["000", "001", "002", "003"])
    assert list(made) == samples
    assert made.classes == real.classes
    for name in ("names", "starts", "targets"):
        assert np.array_equal(getattr(made, name), getattr(real, name))
    held = real.names.nbytes + real.starts.nbytes + real.targets.nbytes
    assert held == formulas.listing(Sizes(1000, 0, 1), scale.NAME)


def test_ten_million_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as 2^24 are: mapped, and in a computed order."""
    monkeypatch.setattr("solo_ext.core.draws.LARGE", 10**6)
    monkeypatch.setattr(scale, "LARGE", 10**6)
    monkeypatch.setattr(scale, "COUNTS", (100, 200))
    # A share of the bank is 10 MB; the whole one would be 5 GB.
    monkeypatch.setattr(scale, "MOST_BYTES", 50e6)
    words = ["scale", "--images", "10000000", "--folder", str(tmp_path), "--check"]
    monkeypatch.setattr("sys.argv", words)
    assert scale.main() == 0
    assert "10,000,000 images; files that processes share: 0.19 GB" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_refuses_what_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scale", "--images", "1000"])
    assert scale.main() == 2
