"""Charts: which rows share one, where names stand, colours that can be read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from solo_ext.lab.experiments.reporting.charts import (
    DARK,
    LIGHT,
    MOST_LINES,
    Dots,
    Line,
    dot_chart,
    line_chart,
)
from solo_ext.lab.experiments.reporting.figures import families
from solo_ext.lab.experiments.reporting.statistics import estimate
from tests.lab.experiments.reporting.report_records import results
from tests.page_tree import parse


def grouped(**bases: list[str]) -> list[list[str]]:
    rows: dict[str, Any] = {name: {"bases": named} for name, named in bases.items()}
    return families(results({}, rows=rows), list(rows))


def test_linked_rows_share_a_chart_and_the_base_comes_first() -> None:
    assert grouped(a=["b"], b=[], c=["b"], d=[]) == [["b", "a", "c"], ["d"]]
    assert grouped(a=[], b=["a"], c=[], d=["c"]) == [["a", "b"], ["c", "d"]]
    # Through another row.
    assert grouped(a=[], b=["a"], c=["b"]) == [["a", "b", "c"]]


def test_rows_that_are_too_many_are_drawn_by_base() -> None:
    first = {f"a{i}": ["x"] for i in range(5)}
    second = {f"b{i}": ["y"] for i in range(4)}
    found = grouped(x=[], y=[], both=["x", "y"], **first, **second)
    assert found == [["x", "both", *first], ["y", "both", *second]]
    many = {f"a{i}": ["x"] for i in range(10)}
    found = grouped(x=[], **many)
    assert [len(family) for family in found] == [8, 4]
    assert all(family[0] == "x" and len(family) <= MOST_LINES for family in found)
    assert [len(family) for family in grouped(**{f"a{i}": [] for i in range(10)})] == [8, 2]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colours", "page"), [(LIGHT, "#ffffff"), (DARK, "#15181c")])
def test_names_can_be_read_on_both_pages(colours: tuple[str, ...], page: str) -> None:
    assert len(set(colours)) == MOST_LINES
    for colour in colours:
        high, low = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_names_beside_curves_do_not_overlap_and_stay_inside() -> None:
    lines = [Line(f"row {i}", [(0, 30.0), (10, 40.0 + i / 100)], i) for i in range(8)]
    svg = parse(line_chart("d", lines, [("pixels", 40.0)], "epochs", "knn")).all("svg")[0]
    names = svg.all("text", "name")
    assert len(names) == 9
    heights = sorted(float(name.attrs["y"]) for name in names)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 12
    height = float(svg.attrs["viewbox"].split()[3])
    assert heights[0] > 0
    assert heights[-1] < height


def test_long_names_are_shortened_and_told_in_full() -> None:
    name = "a-name-that-is-far-too-long-for-a-chart"
    chart = parse(line_chart("d", [Line(name, [(0, 1.0)], 0)], [], "epochs", "knn"))
    assert name in [t.text for t in chart.all("title")]
    assert chart.all("text", "name")[0].text == "a-name-that-is-f…"


def test_dots_are_seeds_mean_and_deviation() -> None:
    found = estimate([40.0, 44.0])
    assert found is not None
    svg = parse(dot_chart("d", [Dots("a", "plugin", [40.0, 44.0], found)], "knn"))
    low, high, mean = (float(c.attrs["cx"]) for c in svg.all("circle"))
    assert low < mean < high
    assert mean == pytest.approx((low + high) / 2, abs=0.1)
    (whisker,) = svg.all("line", "whisker")
    ratio = (float(whisker.attrs["x2"]) - float(whisker.attrs["x1"])) / (high - low)
    assert ratio == pytest.approx(2 * 8**0.5 / 4, abs=0.02)
