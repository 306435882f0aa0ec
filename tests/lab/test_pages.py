"""Report pages, and the tree that pages are tested by."""

from __future__ import annotations

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure as Drawing

from solo_ext.lab.pages import (
    Bullets,
    Figure,
    Figures,
    Paragraph,
    Section,
    Table,
    plain_text,
    png_of,
    render_page,
)
from tests.page_tree import parse

HOSTILE = (
    "</script></title></style>--><script>bad()</script><img src=x onerror=bad()>"
    "\"'><a href='javascript:bad()'>&lt;b&gt;$b$"
)


def test_sections_tables_and_figures_stand_where_they_belong() -> None:
    table = Table(
        ["row", "top-1"], [["pcl", "87.5"], ["simclr", "85.0"]], frozenset({1}), frozenset({(0, 1)})
    )
    page = parse(
        render_page(
            "Report",
            [
                Section("", [Table([], [["model", "pcl"]])]),
                Section("Scores", [Paragraph("failed", "wrong"), table]),
                Section("Curves", [Figures([Figure("loss", b"x"), Figure("none")])]),
                Section("More", [Bullets(["k 20", "t 0.1"])], level=3),
            ],
        )
    )
    assert [h.text for h in page.all("h2")] == ["Scores", "Curves"]
    links = [(a.text, a.attrs["href"]) for a in page.all("a")]
    assert links == [("Scores", "#part-1"), ("Curves", "#part-2")]
    assert [t.text for t in page.all("td", "num")] == ["87.5", "85.0"]
    assert [b.text for b in page.all("b")] == ["87.5"]
    assert [p.text for p in page.all("p", "wrong")] == ["failed"]
    assert [i.attrs["src"] for i in page.all("img")] == ["data:image/png;base64,eA=="]
    assert [c.text for c in page.all("figcaption")] == ["loss", "none"]
    assert [li.text for li in page.all("li")][-2:] == ["k 20", "t 0.1"]


def test_every_text_is_escaped() -> None:
    blocks = [
        Paragraph(HOSTILE),
        Bullets([HOSTILE]),
        Table([HOSTILE], [[HOSTILE]], bold=frozenset({(0, 0)})),
        Figures([Figure(HOSTILE, b"x")]),
    ]
    page = render_page(HOSTILE, [Section(HOSTILE, blocks)])
    assert "<script" not in page
    assert "<img src=x" not in page
    assert parse(page).all("a") == []
    assert parse(page).all("h1")[0].text == HOSTILE
    assert page.count("bad()") > 8
    assert "default-src 'none'" in page
    assert "http://" not in page


def test_figures_are_repeatable_and_read_no_formulas() -> None:
    """And leave the settings of matplotlib alone."""

    def drawn() -> bytes:
        with plain_text():
            figure = Drawing(figsize=(4, 2))
            figure.subplots().set_xlabel("$\\notacommand$")
        return png_of(figure)

    before = dict(mpl.rcParams)
    assert drawn() == drawn()
    assert dict(mpl.rcParams) == before


def test_tree_refuses_broken_pages() -> None:
    for broken in ("<p><b></p></b>", "<p>", "</p>", '<p a="1" a="2"></p>'):
        with pytest.raises(AssertionError):
            parse(broken)
