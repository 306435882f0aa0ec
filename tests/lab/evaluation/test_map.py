"""``eval map`` on scikit-learn's digits."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.decomposition import PCA

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation.evaluate import evaluate, headline
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.map import (
    FeatureMap,
    Map,
    draw_map,
    image_names,
    interactive_page,
    kept_neighbours,
    seeded_sample,
    shortened,
    viz_package,
)

LAYOUT = FeatureMap(perplexity=20.0, n_neighbors=10)
WICKED = "</script><script>bad()</script><img src=http://x/y>"


def rows(digit_images: dict[str, str], out: Path, **settings: Any) -> list[dict[str, Any]]:
    given = {"data": digit_images, "out": str(out), "num_workers": 0, "device": "cpu"}
    found: list[dict[str, Any]] = evaluate("pixels", "map", {**given, **settings})["results"]
    return found


class Loads(HTMLParser):
    """Everything by which a page could load something, and the tags it has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [f"{tag} {k}" for k, _ in attrs if k in ("src", "href", "data", "srcset")]


def test_pictures_and_page(digit_images: dict[str, str], tmp_path: Path) -> None:
    found = rows(digit_images, tmp_path, methods=["pca", "tsne"])
    assert [r["method"] for r in found] == ["pca", "tsne"]
    for row in found:
        with Image.open(tmp_path / row["picture"]) as picture:
            assert picture.format == "PNG"
            colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
        assert len(colours) > 50
        assert 0.5 < row["trustworthiness"] <= 1
        assert row["images"] == 150
    assert set(headline("map", found)) == {"trustworthiness_pca", "trustworthiness_tsne"}
    page = (tmp_path / "map.html").read_text()
    parser = Loads()
    parser.feed(page)
    assert parser.found == []
    assert "link" not in parser.tags
    assert "default-src 'none'" in page
    assert "@import" not in page.partition("<body>")[0]
    # A point says its file.
    name = next((Path(digit_images["val_path"]) / "3").iterdir()).name
    assert f"3/{name}" in page.replace("\\u002f", "/")


@pytest.mark.slow
def test_umap(digit_images: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"methods": ["umap"], "max_images": 60, "html": False}
    (row,) = rows(digit_images, tmp_path / "a", **settings)
    assert row["images"] == 60
    assert "page" not in row
    assert not (tmp_path / "a" / "map.html").exists()
    rows(digit_images, tmp_path / "b", **settings)
    pictures = [(tmp_path / n / "map_umap.png").read_bytes() for n in "ab"]
    assert pictures[0] == pictures[1]


def test_pca_is_scikit_learns_and_repeatable(digits: Features) -> None:
    x = digits.test[:200]
    points = LAYOUT.points(x, "pca")
    np.testing.assert_array_equal(points, LAYOUT.points(x, "pca"))
    expected = PCA(2).fit_transform(F.normalize(x.double(), dim=1).numpy())
    signs = np.sign((points * expected).sum(axis=0))
    np.testing.assert_allclose(points, expected * signs, atol=1e-8)


def test_tsne_follows_the_seed_and_few_points(digits: Features) -> None:
    x = digits.test[:40]
    first = LAYOUT.points(x, "tsne")
    np.testing.assert_array_equal(first, LAYOUT.points(x, "tsne"))
    assert np.isfinite(LAYOUT.points(x[:5], "tsne")).all()


def test_kept_neighbours_of_the_plane_itself_and_of_chance() -> None:
    angle = torch.linspace(0, 1.5, 60)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    assert kept_neighbours(x, x.numpy()) == 1
    shuffled = np.random.default_rng(0).permutation(x.numpy())
    assert kept_neighbours(x, shuffled) < 0.7


def test_names_of_classes_and_files_are_escaped() -> None:
    points = np.arange(8, dtype=float).reshape(4, 2)
    files = [WICKED, "%{x}.png", "a&b.png", "d.png"]
    one = Map(points, np.array([0, 1, 0, 1]), [WICKED, "%{y} <b>"], files, (WICKED, "2"))
    page = interactive_page({"PCA": one, WICKED: one}, WICKED)
    assert WICKED not in page
    assert "<script>bad()" not in page
    parser = Loads()
    parser.feed(page)
    assert parser.found == []
    assert parser.tags.count("script") <= 4
    traces = json.loads(re.findall(r'Plotly\.newPlot\(\s*"map",\s*(\[.*?\]),\s*\{"', page)[0])
    # plotly reads tags in what it shows: what it is given has none.
    for trace in traces:
        assert "<" not in trace["name"]
        assert not any("<" in text for text in trace["text"])
        inner = trace["hovertemplate"].replace("<b>", "").replace("</b><br>%{text}", "")
        assert "%{" not in inner
        assert "<" not in inner.replace("<extra></extra>", "")


def test_legend_has_every_name() -> None:
    """matplotlib leaves out names that begin with an underscore, and reads dollars as formulas."""
    points = np.random.default_rng(0).normal(size=(6, 2))
    what = Map(points, np.array([0, 0, 1, 1, 2, 2]), ["_hidden", "plain", "$x$"], ["n"] * 6)
    (legend,) = draw_map(what, "title").legends
    assert [text.get_text() for text in legend.get_texts()] == ["_hidden", "plain", "$x$"]
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_sample_is_seeded_and_of_few_classes() -> None:
    targets = torch.arange(1000) % 40
    targets[::7] = -1
    chosen = seeded_sample(targets, 100, 5, seed=0)
    assert torch.equal(chosen, seeded_sample(targets, 100, 5, seed=0))
    assert not torch.equal(chosen, seeded_sample(targets, 100, 5, seed=1))
    assert len(chosen.unique()) == 100
    assert len(targets[chosen].unique()) == 5
    assert int(targets[chosen].min()) >= 0
    assert len(seeded_sample(targets, 10**6, 100, seed=0)) == int((targets >= 0).sum())


def test_names_of_images_follow_parts_of_a_data_set(digit_images: dict[str, str]) -> None:
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    images: Any = ImageFolder(digit_images["val_path"])
    part: Any = Subset(Subset(images, [5, 9, 30]), [2, 0])
    files = [Path(images.samples[i][0]) for i in (30, 5)]
    assert image_names(part, [0, 1]) == [f"{p.parent.name}/{p.name}" for p in files]
    assert image_names([("x", 0)] * 3, [2]) == ["image 2"]  # type: ignore[arg-type]


def test_long_names_are_shortened() -> None:
    assert shortened("n" * 24, 24) == "n" * 24
    assert shortened("Staffordshire bull terrier of old", 24) == "Staffordshir…rier of old"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"methods": ["tnse"]}, "methods.0='tnse': not a valid choice; did you mean 'tsne'?"),
        ({"methods": []}, "methods=[]: not a valid value"),
        ({"max_images": 3}, "max_images=3: leaves 3 images; a map needs four"),
        ({"perplexity": 0}, "perplexity=0: not a valid value"),
        ({"split": "val"}, "split='val': not a valid choice"),
    ],
)
def test_settings_are_refused(
    settings: dict[str, Any], line: str, digit_images: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(digit_images, tmp_path, **settings)
    assert str(caught.value).startswith(line)


def test_missing_package_is_a_line() -> None:
    with pytest.raises(UserError, match=r"needs no_such_thing, .* pip install 'solo-ext\[viz\]'"):
        viz_package("no_such_thing.inner")
