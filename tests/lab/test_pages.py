"""Report pages, and the tree that pages are tested by."""

from __future__ import annotations

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure as Drawing

from solo_ext.lab.pages import (
    COLOURS,
    Bullets,
    Figure,
    Figures,
    Folded,
    Paragraph,
    Section,
    Table,
    chart_style,
    colour,
    figure_svg,
    render_page,
)
from tests.page_tree import parse

HOSTILE = "</script></title></style>--><script>bad()</script><img src=x onerror=bad()>\"'&lt;$b$"


def drawing(label: str) -> str:
    with chart_style():
        figure = Drawing(figsize=(6, 3))
        axes = figure.subplots()
        axes.plot([1, 2, 3], [70.0, 80.0, 85.0], color=colour("plugin"), label=label)
        axes.set_xlabel(label)
        axes.legend()
        return figure_svg(figure)


def test_sections_tables_and_figures_stand_where_they_belong() -> None:
    table = Table(
        ["row", "top-1"], [["pcl", "87.5"], ["simclr", "85.0"]], frozenset({1}), frozenset({(0, 1)})
    )
    page = parse(
        render_page(
            "Report",
            [
                Section("", [Table([], [["model", "pcl"]])]),
                Section("Scores", [Paragraph("failed", "wrong"), table], note="knn"),
                Section("Curves", [Figures([Figure("loss", drawing("pcl"))])]),
                Section("More", [Folded("settings", [Bullets(["k 20", "t 0.1"])])], level=3),
            ],
        )
    )
    assert [h.text for h in page.all("h2")] == ["Scoresknn", "Curves"]
    links = [(a.text, a.attrs["href"]) for a in page.all("a")]
    assert links == [("Scores", "#part-1"), ("Curves", "#part-2")]
    assert [t.text for t in page.all("td", "num")] == ["87.5", "85.0"]
    assert [b.text for b in page.all("b")] == ["87.5"]
    assert [p.text for p in page.all("p", "wrong")] == ["failed"]
    assert len(page.all("svg")) == 1
    assert [li.text for li in page.all("details")[0].all("li")] == ["k 20", "t 0.1"]


def test_every_text_is_escaped() -> None:
    figures = [
        Figure(HOSTILE, drawing(HOSTILE)),
        Figure("not by us", HOSTILE),
        Figure("", "", b"x"),
    ]
    blocks = [
        Paragraph(HOSTILE),
        Bullets([HOSTILE]),
        Table([HOSTILE], [[HOSTILE]], bold=frozenset({(0, 0)})),
        Figures(figures),
        Folded(HOSTILE, [Paragraph(HOSTILE)]),
    ]
    page = render_page(HOSTILE, [Section(HOSTILE, blocks, note=HOSTILE)])
    assert "<script" not in page
    assert "<img src=x" not in page
    root = parse(page)
    assert root.all("h1")[0].text == HOSTILE
    assert root.all("svg")[0].all("text")[-1].text == HOSTILE
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_figures_follow_the_colours_of_the_page() -> None:
    svg = drawing("pcl")
    assert "var(--plugin)" in svg
    assert not [light for light, _ in COLOURS.values() if light in svg]
    assert svg == drawing("pcl")
    # Six inches of text of 11 points do not shrink below 10 pixels on a phone.
    assert 'style="min-width: 389px; max-width: 475px"' in svg


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", ["light", "dark"])
def test_text_and_lines_can_be_read_on_either_paper(paper: str) -> None:
    """The contrast that WCAG 2 asks of text; bars and rules are areas, and may be paler."""
    colours = {name: pair[paper == "dark"] for name, pair in COLOURS.items()}
    page = luminance(colours.pop("page"))
    for area in ("rule", "host", "baseline"):
        del colours[area]
    assert len(set(colours.values())) == len(colours)
    for name, value in colours.items():
        high, low = sorted((luminance(value), page), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_figures_leave_the_settings_of_matplotlib_alone() -> None:
    before = dict(mpl.rcParams)
    drawing("pcl")
    assert dict(mpl.rcParams) == before


def test_tree_refuses_broken_pages() -> None:
    for broken in ("<p><b></p></b>", "<p>", "</p>", '<p a="1" a="2"></p>'):
        with pytest.raises(AssertionError):
            parse(broken)
