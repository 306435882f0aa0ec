"""``eval map`` on scikit-learn's digits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.decomposition import PCA

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.map import FeatureMap, _draw_map, seeded_sample
from tests.lab.evaluation.conftest import shared

LAYOUT = FeatureMap(perplexity=20.0, n_neighbors=10)


def rows(digit_images: dict[str, str], out: Path, **settings: Any) -> list[dict[str, Any]]:
    given = shared(digit_images, out)
    found: list[dict[str, Any]] = evaluate("pixels", "map", {**given, **settings})["results"]
    return found


@pytest.mark.slow
def test_pictures(digit_images: dict[str, str], tmp_path: Path) -> None:
    found = rows(digit_images, tmp_path, methods=["pca", "tsne"])
    assert [r["method"] for r in found] == ["pca", "tsne"]
    for row in found:
        with Image.open(tmp_path / row["picture"]) as picture:
            assert picture.format == "PNG"
            colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
        assert len(colours) > 50
        assert 0.5 < row["trustworthiness"] <= 1
        assert row["images"] == 150
    assert set(PROTOCOLS["map"].headline(found)) == {"trustworthiness_pca", "trustworthiness_tsne"}


@pytest.mark.slow
def test_umap(digit_images: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"methods": ["umap"], "max_images": 60}
    (row,) = rows(digit_images, tmp_path / "a", **settings)
    assert row["images"] == 60
    rows(digit_images, tmp_path / "b", **settings)
    pictures = [(tmp_path / n / "map_umap.png").read_bytes() for n in "ab"]
    assert pictures[0] == pictures[1]


def test_pca_is_scikit_learns_and_repeatable(digits: Features) -> None:
    x = F.normalize(digits.test[0][:200].double(), dim=1).numpy()
    points, axes = LAYOUT._points(x, "pca")
    np.testing.assert_array_equal(points, LAYOUT._points(x, "pca")[0])
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
    first, _ = LAYOUT._points(x, "tsne")
    np.testing.assert_array_equal(first, LAYOUT._points(x, "tsne")[0])
    assert np.isfinite(LAYOUT._points(x[:5], "tsne")[0]).all()


def test_legend_has_every_name() -> None:
    """matplotlib leaves out names that begin with an underscore, and reads dollars as formulas."""
    points = np.random.default_rng(0).normal(size=(6, 2))
    names = ["_hidden", "plain", "$x$"]
    (legend,) = _draw_map(points, np.array([0, 0, 1, 1, 2, 2]), names, "title").legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_sample_is_seeded_and_of_few_classes() -> None:
    targets = torch.arange(1000) % 40
    chosen = seeded_sample(targets, 100, 0, 5)
    assert torch.equal(chosen, seeded_sample(targets, 100, 0, 5))
    assert not torch.equal(chosen, seeded_sample(targets, 100, 1, 5))
    assert len(chosen.unique()) == 100
    assert len(targets[chosen].unique()) == 5
    assert len(seeded_sample(targets, 10**6, 0)) == len(targets)


def test_few_images_are_a_line(digit_images: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_images=3: leaves 3 images; a map needs four"):
        rows(digit_images, tmp_path, max_images=3)


def test_missing_package_is_a_line(
    digit_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(UserError, match=r"umap-learn is not installed; pip install 'solo-ext\[viz"):
        rows(digit_images, tmp_path, methods=["umap"])
