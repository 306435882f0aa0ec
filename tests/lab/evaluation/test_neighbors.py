"""``eval neighbors`` on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import NearestNeighbors

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation import neighbors
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.neighbors import _draw_grid, _nearest, _Shown
from tests.lab.evaluation.conftest import shared


def run(digit_images: dict[str, str], out: Path, **settings: Any) -> dict[str, Any]:
    given = shared(digit_images, out)
    (row,) = evaluate("pixels", "neighbors", {**given, **settings})["results"]
    return dict(row)


def test_nearest_are_those_of_a_search_by_hand(
    digits: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of queries.
    x, bank = digits.test[0], digits.train[0]
    monkeypatch.setattr(neighbors, "_BLOCK", 50 * len(bank))
    found, similarity = _nearest(x, bank, 5)
    search = NearestNeighbors(n_neighbors=5, metric="cosine", algorithm="brute")
    distance, expected = search.fit(bank.numpy()).kneighbors(x.numpy())
    np.testing.assert_allclose(similarity.numpy(), 1 - distance, atol=1e-5)
    assert np.mean(found.numpy() == expected) > 0.999


def test_grid_shows_the_nearest_and_says_which_are_right(
    digit_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spy(rows: Any, title: str) -> Any:
        seen.append(rows)
        return _draw_grid(rows, title)

    monkeypatch.setattr(neighbors, "_draw_grid", spy)
    row = run(digit_images, tmp_path, queries=12, k=3, crop_size=16)
    with Image.open(tmp_path / row["picture"]) as picture:
        assert picture.format == "PNG"
    (grid,) = seen
    assert len(grid) == row["queries"] == 12
    assert len({r[0].name for r in grid}) > 5
    images = {Image.open(p).tobytes(): p for p in Path(digit_images["train_path"]).glob("*/*.png")}
    for query, *others in grid:
        shown = [images[s.image.convert("L").tobytes()].parent.name for s in others]
        assert [s.name for s in others] == shown
        assert [s.right for s in others] == [s.name == query.name for s in others]
        similarity = [s.similarity for s in others]
        assert similarity == sorted(similarity, reverse=True)
        assert similarity == pytest.approx([flat(s) @ flat(query) for s in others], abs=1e-4)


def flat(shown: _Shown) -> np.ndarray:
    """The features of an image: its pixels as ImageNet's mean and deviation normalise them."""
    x = np.asarray(shown.image) / 255 - (0.485, 0.456, 0.406)
    x = (x / (0.229, 0.224, 0.225)).ravel()
    return x / np.linalg.norm(x)


def test_right_ones_alone_have_a_frame(tmp_path: Path) -> None:
    grey = Image.new("RGB", (16, 16), (120, 120, 120))
    green = np.array([0x12, 0x81, 0x3B])

    def greens(*right: bool) -> int:
        row = [_Shown(grey, "q"), *(_Shown(grey, "n", 0.5, r) for r in right)]
        _draw_grid([row], "title").savefig(tmp_path / "grid.png")
        with Image.open(tmp_path / "grid.png") as picture:
            pixels = np.asarray(picture.convert("RGB")).astype(int)
        return int((np.abs(pixels - green).max(axis=2) < 4).sum())

    assert greens(False, False) == 0
    one = greens(True, False)
    assert one > 100
    assert greens(True, True) == pytest.approx(2 * one, rel=0.05)


def test_precision_is_of_the_whole_test_split(digit_images: dict[str, str], tmp_path: Path) -> None:
    row = run(digit_images, tmp_path, queries=2, k=1, crop_size=16)
    given = {"data": digit_images, "out": str(tmp_path), "num_workers": 0, "device": "cpu"}
    settings = {**given, "k": [1], "temperature": [0.1], "crop_size": 16}
    (knn,) = evaluate("pixels", "knn", settings)["results"]
    assert row["precision"] == pytest.approx(knn["acc1"], abs=1e-4)


def test_few_images_are_a_line(digit_images: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k=301: there are 300 training images; take fewer"):
        run(digit_images, tmp_path, k=301)
