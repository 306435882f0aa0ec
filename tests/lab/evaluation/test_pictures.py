"""``eval map`` and ``eval neighbors`` on scikit-learn's digits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation import pictures
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.pictures import (
    FeatureMap,
    _draw_grid,
    _draw_map,
    _seeded_sample,
    _Shown,
)
from solo_ext.memory import knn
from solo_ext.memory.knn import nearest_neighbors
from tests.lab.evaluation.conftest import shared

LAYOUT = FeatureMap(perplexity=20.0, n_neighbors=10)
Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def rows(digit_images: dict[str, str], tmp_path: Path) -> Rows:
    """``rows(protocol, **settings)``: what a protocol finds."""

    def run(protocol: str, **settings: Any) -> Any:
        given = {**shared(digit_images, tmp_path), **settings}
        return evaluate("pixels", protocol, given)["results"]

    return run


@pytest.mark.slow
def test_maps(rows: Rows, tmp_path: Path) -> None:
    found = rows("map", methods=["pca", "tsne"])
    assert [r["method"] for r in found] == ["pca", "tsne"]
    for row in found:
        with Image.open(tmp_path / row["picture"]) as picture:
            assert picture.format == "PNG"
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 50
        assert 0.5 < row["trustworthiness"] <= 1
        assert row["images"] == 150
    assert set(PROTOCOLS["map"].headline(found)) == {"trustworthiness_pca", "trustworthiness_tsne"}


@pytest.mark.slow
def test_umap(rows: Rows, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"methods": ["umap"], "max_images": 60}
    (row,) = rows("map", **settings, out=str(tmp_path / "a"))
    assert row["images"] == 60
    rows("map", **settings, out=str(tmp_path / "b"))
    first, second = ((tmp_path / n / "map_umap.png").read_bytes() for n in "ab")
    assert first == second


def test_pca_is_scikit_learns_and_repeatable(digits: Features) -> None:
    x = F.normalize(digits.test[0][:200].double(), dim=1).numpy()
    points, axes = LAYOUT.points(x, "pca")
    np.testing.assert_array_equal(points, LAYOUT.points(x, "pca")[0])
    pca = PCA(2)
    expected = pca.fit_transform(x)
    assert [
        f"{share:.0%}" in name
        for share, name in zip(pca.explained_variance_ratio_, axes, strict=True)
    ] == 2 * [True]
    signs = np.sign((points * expected).sum(axis=0))
    np.testing.assert_allclose(points, expected * signs, atol=1e-8)


def test_tsne_follows_the_seed_and_few_points(digits: Features) -> None:
    x = F.normalize(digits.test[0][:40].double(), dim=1).numpy()
    first, _ = LAYOUT.points(x, "tsne")
    np.testing.assert_array_equal(first, LAYOUT.points(x, "tsne")[0])
    assert np.isfinite(LAYOUT.points(x[:5], "tsne")[0]).all()


def test_legend_has_every_name() -> None:
    """matplotlib leaves out names that begin with an underscore, and reads dollars as formulas."""
    points = np.random.default_rng(0).normal(size=(6, 2))
    names = ["_hidden", "plain", "$x$"]
    (legend,) = _draw_map(points, np.array([0, 0, 1, 1, 2, 2]), names, "title").legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_sample_is_seeded_and_of_few_classes() -> None:
    targets = torch.arange(1000) % 40
    chosen = _seeded_sample(targets, 100, 0, 5)
    assert torch.equal(chosen, _seeded_sample(targets, 100, 0, 5))
    assert not torch.equal(chosen, _seeded_sample(targets, 100, 1, 5))
    assert len(chosen.unique()) == 100
    assert len(targets[chosen].unique()) == 5
    assert len(_seeded_sample(targets, 10**6, 0)) == len(targets)


def test_missing_package_is_a_line(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(UserError, match=r"umap-learn is not installed; pip install 'solo-ext\[viz"):
        rows("map", methods=["umap"])


@pytest.mark.parametrize(
    ("protocol", "settings", "line"),
    [
        ("map", {"max_images": 3}, "max_images=3: leaves 3 images; a map needs four"),
        ("neighbors", {"k": 301}, "k=301: there are 300 training images; take fewer"),
    ],
)
def test_few_images_are_a_line(
    protocol: str, settings: dict[str, Any], line: str, rows: Rows
) -> None:
    with pytest.raises(ConfigError, match=line):
        rows(protocol, **settings)


def test_nearest_are_those_of_a_search_by_hand(
    digits: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of queries.
    x, bank = digits.test[0], digits.train[0]
    monkeypatch.setattr(knn, "_MAX_ELEMENTS", 50 * len(bank))
    found, similarity = nearest_neighbors(x, bank, 5)
    search = NearestNeighbors(n_neighbors=5, metric="cosine", algorithm="brute")
    distance, expected = search.fit(bank.numpy()).kneighbors(x.numpy())
    np.testing.assert_allclose(similarity.numpy(), 1 - distance, atol=1e-5)
    assert np.mean(found.numpy() == expected) > 0.999


def test_grid_shows_the_nearest_and_says_which_are_right(
    rows: Rows, digit_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spy(grid: Any, title: str) -> Any:
        seen.append(grid)
        return _draw_grid(grid, title)

    monkeypatch.setattr(pictures, "_draw_grid", spy)
    (row,) = rows("neighbors", queries=12, k=3)
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


def test_precision_is_of_the_whole_test_split(rows: Rows) -> None:
    (row,) = rows("neighbors", queries=2, k=1)
    (knn,) = rows("knn", k=[1], temperature=[0.1])
    assert row["precision"] == pytest.approx(knn["acc1"], abs=1e-4)
