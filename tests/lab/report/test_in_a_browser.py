"""The page of a run in Chromium: pictures under the pointer, no error, no request, no overflow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from solo_ext.lab.pages import Bullets, Section, Table, render_page
from solo_ext.lab.report.run_page import report_run
from tests.lab.report.browser import CHROMIUM, Tab, in_browser
from tests.lab.report.conftest import MakeSample
from tests.lab.report.test_run_page import HOSTILE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

MARKS = "[...document.querySelectorAll('.mark-symbol.role-mark')].at(-1)"
"""The group of the map's points, which is the last chart."""


@pytest.fixture
def page(run_dir: Path, make_sample: MakeSample) -> Path:
    """Names and classes that would break it, if anything could."""
    names = [f"{number}/{name}" for number, name in enumerate(HOSTILE)]
    labelled = replace(make_sample(names), labels=HOSTILE)
    return report_run(run_dir, labelled, method="pca")


async def _drawn(tab: Tab) -> None:
    await tab.until("document.querySelectorAll('.chart.drawn').length == 4")


def test_a_point_shows_its_picture_and_name(page: Path, make_sample: MakeSample) -> None:
    names = make_sample([f"{number}/{name}" for number, name in enumerate(HOSTILE)]).names
    shown: set[str] = set()

    async def visit(tab: Tab) -> None:
        await _drawn(tab)
        await tab.run(f"{MARKS}.scrollIntoView({{behavior: 'instant', block: 'center'}})")
        assert await tab.run(f"{MARKS}.children.length") == len(names)
        for number in range(len(names)):
            await tab.point_at(1, 1)
            box = f"{MARKS}.children[{number}].getBoundingClientRect()"
            x, y = await tab.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
            await tab.point_at(x, y)
            hover = "document.querySelector('#vg-tooltip-element.visible img')"
            # Points may cover each other; which one is shown, the tooltip says.
            width = await tab.until(f"{hover} && {hover}.naturalWidth")
            assert width == 32
            tooltip = "document.querySelector('#vg-tooltip-element')"
            shown.add(await tab.run(f"{tooltip}.querySelector('h2').textContent"))
            inner = f"[...{tooltip}.querySelectorAll('*')].map(e => e.localName)"
            assert set(await tab.run(inner)) == {"h2", "img", "table", "tbody", "tr", "td"}

    tab = in_browser(page, visit)
    assert tab.troubles == []
    assert len(shown) >= len(names) - 1
    assert shown <= set(names)
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []


def test_colours_follow_what_is_chosen(page: Path) -> None:
    async def visit(tab: Tab) -> None:
        await _drawn(tab)
        fills = f"[...{MARKS}.children].map(point => point.getAttribute('fill'))"
        assert len(set(await tab.run(fills))) == len(HOSTILE)
        names = "[...document.querySelectorAll('select option')].map(o => o.textContent)"
        assert await tab.run(names) == ["class", "3 clusters", "6 clusters"]
        await tab.run(
            "(s => {s.selectedIndex = 1; s.dispatchEvent(new Event('input', {bubbles: true}));"
            "s.dispatchEvent(new Event('change', {bubbles: true}))})"
            "(document.querySelector('select'))"
        )
        assert await tab.until(f"new Set({fills}).size == 3")

    assert in_browser(page, visit).troubles == []


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_screen(page: Path, width: int, tmp_path: Path) -> None:
    """Wide tables scroll by themselves."""
    table = Table(["row", *"abcdefghijklmnop"], [["x" * 60, *["12.34 ± 1.23"] * 16]])
    wide = tmp_path / "wide.html"
    blocks = [table, Bullets(["y" * 300])]
    wide.write_text(render_page("z" * 200, [Section("w" * 100, blocks), Section("more")]))

    async def visit(tab: Tab) -> None:
        for dark in (False, True):
            await tab.screen(width, 900, dark=dark)
            assert await tab.run("document.documentElement.scrollWidth") <= width

    for file in (page, wide):
        assert in_browser(file, visit).troubles == []


def test_light_and_dark(page: Path) -> None:
    async def visit(tab: Tab) -> None:
        await _drawn(tab)
        colours = (
            "['.page section', '.chart svg text'].map(place => getComputedStyle("
            "document.querySelector(place))).map(s => [s.backgroundColor, s.fill])"
        )
        found = []
        for dark in (False, True):
            await tab.screen(1400, 900, dark=dark)
            (ground, _), (_, text) = await tab.run(colours)
            found.append((_lightness(ground), _lightness(text)))
        (day, print_), (night, glow) = found
        assert day > 0.9 > 0.6 > print_
        assert night < 0.2 < 0.5 < glow

    assert in_browser(page, visit).troubles == []


def _lightness(colour: str) -> float:
    """Of `rgb(r, g, b)`."""
    values = json.loads(colour.replace("rgb(", "[").replace(")", "]"))
    return float(sum(values)) / 3 / 255


def test_a_script_that_is_not_the_pages_own_is_refused(page: Path, tmp_path: Path) -> None:
    """Also if a text were ever written without being escaped."""
    broken = tmp_path / "broken.html"
    evil = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    broken.write_text(page.read_text().replace("<main>", f"<main>{evil}"))

    async def visit(tab: Tab) -> None:
        await _drawn(tab)
        assert await tab.run("document.title") == "flowers"

    tab = in_browser(broken, visit)
    assert any("Content Security Policy" in trouble for trouble in tab.troubles)
