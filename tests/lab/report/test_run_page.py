"""The page of a run: its numbers, its pictures, its size, and what names of files may do to it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines
from solo_ext.lab.evaluation.sample import Clusters, Sample
from solo_ext.lab.report import charts
from solo_ext.lab.report.galleries import near_duplicates, neighbours
from solo_ext.lab.report.run_page import report_run
from solo_ext.lab.training.run_dir import CONFIG, ENVIRONMENT, EPOCHS, METRICS
from tests.lab.report.conftest import MakeSample
from tests.page_tree import Node, parse

HOSTILE = [
    "</script><script>alert(1)</script>.png",
    "<img src=x onerror=alert(1)>.png",
    "\"'`$&{{7*7}}.png",
    "größe 大 عربي.png",
    "\u202egnp.exe",
    "line\nbreak\r\u2028.png",
    "javascript:alert(1)",
    "lost \udc80 byte.png",
    "]]><!--.png",
]


def _cards(page: Node) -> dict[str, str]:
    return {
        card.all("dt")[0].text: card.all("dd")[0].text
        for cards in page.all("dl", "cards")
        for card in cards.children
        if card.tag == "div"
    }


def _specs(page: Node) -> list[dict[str, Any]]:
    return [json.loads(s.text) for s in page.all("script") if s.attrs.get("type")]


def _values(spec: dict[str, Any]) -> list[dict[str, Any]]:
    data = spec["data"]
    return data["values"] if "values" in data else spec["datasets"][data["name"]]


def test_numbers_and_curves_are_those_of_the_run(run_dir: Path) -> None:
    page = parse(report_run(run_dir).read_text())
    cards = _cards(page)
    assert cards["Epochs"] == "3"
    assert cards["Time"] == "6 s"
    assert cards["Images/s"] == "20"
    assert cards["InfoNCE loss"] == "2"
    assert cards["Spread"] == "0.75"
    assert cards["kNN top-1"] == "60"
    assert not any("class" in name.lower() for name in cards)
    loss, spread, knn = (_values(spec) for spec in _specs(page))
    assert [(v["epoch"], v["value"]) for v in loss] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert [(v["epoch"], v["value"]) for v in spread] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(v["epoch"], v["value"]) for v in knn] == [(0, 10), (1, 20), (2, 40), (3, 60)]
    facts = {
        row.all("th")[0].text: row.all("td")[0].text for row in page.all("tr") if row.all("td")
    }
    assert facts["optimizer.batch_size"] == "10"
    assert facts["packages.torch"] == "2.15"


def test_speed_and_memory_are_those_of_the_epochs(run_dir: Path) -> None:
    """Not of the evaluations, where the times of epochs are known."""
    epochs = [
        {"epoch": 0, "images": 40, "seconds": 9.0, "resident": 1 << 30, "cuda": None},
        {"epoch": 0, "images": 40, "seconds": 0.5, "resident": 2 << 30, "cuda": None},
        {"epoch": 1, "images": 40, "seconds": 0.3, "resident": 3 << 29, "cuda": "?"},
    ]
    append_lines(run_dir / EPOCHS, epochs)
    page = parse(report_run(run_dir).read_text())
    assert _cards(page)["Images/s"] == "100"
    assert _cards(page)["Peak memory"] == "2.00 GiB"
    assert "Peak GPU memory" not in _cards(page)
    assert "without evaluations" in page.all("dl", "cards")[0].text
    append_lines(run_dir / EPOCHS, [epochs[2] | {"cuda": 1 << 29}])
    page = parse(report_run(run_dir).read_text())
    assert _cards(page)["Peak GPU memory"] == "0.50 GiB"


def test_pictures_clusters_and_map(run_dir: Path, make_sample: MakeSample) -> None:
    names = [f"photos/{i:02}.png" for i in range(30)]
    page = parse(report_run(run_dir, make_sample(names), method="pca").read_text())
    titles = [h.text for h in page.all("h2")]
    assert titles == [
        "Training",
        "Map of the embeddings",
        "Clusters (3, 6)",
        "Nearest neighbours",
        "Near duplicates",
        "Outliers",
        "Settings and environment",
    ]
    points = _values(_specs(page)[-1])
    assert {p["title"] for p in points} == {name.removeprefix("photos/") for name in names}
    assert all(p["image"].startswith("data:image/webp;base64,") for p in points)
    assert {p["c0"] for p in points} == {"class 0", "class 1", "class 2"}
    assert [h.text for h in page.all("h3")] == ["3 clusters", "6 clusters", "6 clusters within 3"]
    said = [p.text for p in page.all("p", "soft")]
    assert "Tight: cluster 0, 10 images, concentration 0.1" in said
    assert "Loose: cluster 2, 10 images, concentration 0.3" in said
    assert any(
        p.text.startswith("100% of the images are in the same of 3 coarse") for p in page.all("p")
    )


def test_a_gallery_begins_at_the_prototype(run_dir: Path, make_sample: MakeSample) -> None:
    sample = make_sample([f"{i:02}.png" for i in range(30)])
    page = parse(report_run(run_dir, sample, method="pca").read_text())
    (tight,) = (
        g
        for g in page.all("div", "gallery")
        if g.all("p") and g.all("p")[0].text.startswith("Tight: cluster 0, 10 ")
    )
    found = [int(f.attrs["title"].removesuffix(".png")) for f in tight.all("figure")]
    of = sample.clusters[3]
    ranked = sorted(range(0, 30, 3), key=lambda row: of.distances[row])
    assert found == ranked[:6] + ranked[-3:]


def test_names_of_files_are_text(run_dir: Path, make_sample: MakeSample) -> None:
    sample = make_sample([f"{i}/{name}" for i, name in enumerate(HOSTILE * 2)])
    labelled = replace(sample, labels=HOSTILE * 2)
    config = run_dir / CONFIG
    config.write_text(config.read_text().replace("flowers", "</title><script>alert(1)</script>"))
    text = report_run(run_dir, labelled, method="pca").read_text()
    page = parse(text)
    # Of the charts, whose specifications are no programs, and the two that draw them.
    kinds = [s.attrs.get("type", "program") for s in page.all("script")]
    assert kinds == ["application/json"] * (len(kinds) - 2) + ["program"] * 2
    assert not [i for i in page.all("img") if not i.attrs["src"].startswith("data:image/")]
    for node in (n for tag in ("img", "figure", "a", "bdi") for n in page.all(tag)):
        assert not {key for key in node.attrs if key.startswith("on")}
    assert {a.attrs["href"][:6] for a in page.all("a")} == {"#part-"}
    titles = {f.attrs["title"] for f in page.all("figure") if "title" in f.attrs}
    assert "0/</script><script>alert(1)</script>.png" in titles
    assert "4/\\u202egnp.exe" in titles
    assert "5/line\\nbreak\\r\\u2028.png" in titles
    assert {p["title"] for p in _values(_specs(page)[-1])} == set(labelled.names)
    policy = next(m.attrs["content"] for m in page.all("meta") if "http-equiv" in m.attrs)
    assert "default-src 'none'" in policy
    (scripts,) = re.findall(r"script-src ([^;]*)", policy)
    # Two digests and nothing else: no address, no `data:`, no `unsafe-inline`.
    assert re.fullmatch(r"'sha256-[\w+/=]+' 'sha256-[\w+/=]+'", scripts)
    assert "connect-src" not in policy


@pytest.mark.slow
def test_a_page_of_many_noisy_pictures_stays_below_10_mb(run_dir: Path) -> None:
    """Noise is what compresses worst."""
    n = 2600
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 255, (140, 140, 3), dtype=np.uint8)) for _ in range(8)]
    clusters = {
        k: Clusters(rng.integers(0, k, n), rng.random(n), rng.random(k)[np.arange(n) % k])
        for k in (5, 20, 80, 300, 400)
    }
    sample = Sample(
        [f"{i}.png" for i in range(n)],
        rng.normal(size=(n, 16)),
        lambda row: noise[row % 8].copy(),
        clusters=clusters,
    )
    file = report_run(run_dir, sample, method="pca")
    assert file.stat().st_size < 10_000_000
    (caption,) = re.findall(r"PCA of ([\d,]+) of 2,600 images", file.read_text())[:1]
    assert 200 < int(caption.replace(",", "")) <= 2000


def test_unreadable_pictures_are_named(run_dir: Path, make_sample: MakeSample) -> None:
    sample = make_sample([f"{i}.png" for i in range(12)])

    def opened(row: int) -> Image.Image:
        if row == 7:
            raise OSError("cut short")
        return sample.open_image(row)

    broken = Sample(sample.paths, sample.embeddings, opened)
    page = parse(report_run(run_dir, broken, method="pca").read_text())
    (fold,) = (d for d in page.all("details") if "cannot be read" in d.text)
    assert [th.text for th in fold.all("th")] == ["7.png"]
    assert page.all("div", "no-picture")


def test_embeddings_that_are_not_finite_are_left_out(
    run_dir: Path, make_sample: MakeSample
) -> None:
    sample = make_sample([f"{i}.png" for i in range(12)])
    sample.embeddings[[2, 5]] = [[np.nan], [np.inf]]
    page = parse(report_run(run_dir, sample, method="pca").read_text())
    assert [p.text[:20] for p in page.all("p", "wrong")] == ["2 of 12 embeddings a"]
    kept = {f"{i}.png" for i in range(12)} - {"2.png", "5.png"}
    assert {p["title"] for p in _values(_specs(page)[-1])} == kept
    sample.embeddings[:] = np.nan
    assert "12 of 12" in report_run(run_dir, sample).read_text()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_images(run_dir: Path, make_sample: MakeSample, count: int) -> None:
    sample = make_sample([f"{i}.png" for i in range(count)])
    page = parse(report_run(run_dir, sample, method="pca").read_text())
    assert ("Nearest neighbours" in [h.text for h in page.all("h2")]) == (count > 1)


def test_a_run_with_nothing_but_its_config(run_dir: Path) -> None:
    for name in (METRICS, ENVIRONMENT):
        (run_dir / name).unlink()
    page = parse(report_run(run_dir).read_text())
    assert page.all("h1")[0].text == "flowers"
    assert page.all("script") == []


def test_without_altair_one_line_says_how_to_get_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(UserError, match=r"pip install 'solo-ext\[report\]'"):
        report_run(run_dir)


def test_neighbours_equal_a_loop() -> None:
    """Copies of a row are its neighbours, and never the row itself."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5))
    x[7] = x[3] = x[20]
    places, cosines = neighbours(x, 6)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for row in range(40):
        others = sorted((float(unit[row] @ unit[j]) for j in range(40) if j != row), reverse=True)
        assert row not in places[row]
        assert len(set(places[row])) == 6
        np.testing.assert_allclose(cosines[row], others[:6], atol=1e-6)
    pairs = near_duplicates(places, cosines)
    assert {pair[:2] for pair in pairs[:3]} == {(3, 7), (3, 20), (7, 20)}
    assert len({pair[:2] for pair in pairs}) == len(pairs)


def test_all_embeddings_alike() -> None:
    places, cosines = neighbours(np.ones((12, 4)), 3)
    assert all(row not in found for row, found in enumerate(places.tolist()))
    np.testing.assert_allclose(cosines, 1.0, atol=1e-6)


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    points = [(float(i), float(i)) for i in range(1, 1001)]
    kept = charts._thinned(points)
    assert len(kept) <= 400
    assert kept[-1] == points[-1]
