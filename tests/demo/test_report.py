"""The demo report: what the page says, that it is well formed, and that it fetches nothing."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from solo_ext.demo.report import Curve, FeatureMap, Report, Row, render, write_report
from solo_ext.demo.svg import Bar, bar_chart, loss_chart
from tests.page_tree import Node, parse

NAN = float("nan")
DASH = "\N{EN DASH}"
HOSTILE = "<script>alert(1)</script>\"'&"
# Order of the columns after the name of the method.
KIND, FEW, LINEAR, KNN, SECONDS, SPEED = range(6)


def row(label: str, kind: str = "plugin", few: float = 80.0, **values: object) -> Row:
    base = Row(label, kind, 90.0, few, 1.5, 85.0, 60.0, 1000.0)
    return replace(base, **values)  # type: ignore[arg-type]


def report(**values: object) -> Report:
    points = np.random.default_rng(0).normal(size=(30, 2))
    names = [str(digit) for digit in range(10)]
    base = Report(
        title="Digits",
        rows=[
            row("alpha", "plugin", 88.04, linear=93.0, knn=91.0, seconds=70.0),
            row("beta", "host", 91.26, linear=92.0, knn=95.0, images_per_second=2000.0),
            row("pixels", "baseline", 97.0, linear=98.0, knn=99.0, seconds=None,
                images_per_second=None, note="no network"),
        ],
        curves=[Curve("alpha", [1, 2, 3], [3.0, 2.0, 1.5]), Curve("beta", [1, 2], [9.0, 8.0])],
        maps=[FeatureMap("alpha", points, np.arange(30) % 10, names)],
        environment={"Device": "CPU"},
        config={"epochs": "3"},
        notes=["One seed."],
    )  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


def cells(page: str) -> dict[str, list[Node]]:
    """Returns the cells of the results table by the label of the method, in page order."""
    body = parse(page).all("table", "results")[0].all("tbody")[0]
    return {line.all("th")[0].text: line.all("td") for line in body.all("tr")}


def bold(page: str, column: int) -> list[str]:
    return [label for label, line in cells(page).items() if line[column].all("b")]


def hostile_report() -> Report:
    points = np.zeros((2, 2))
    return report(
        title=HOSTILE,
        rows=[row(HOSTILE, note=HOSTILE)],
        curves=[Curve(HOSTILE, [1], [1.0])],
        maps=[FeatureMap(HOSTILE, points, np.array([0, 0]), [HOSTILE])],
        environment={HOSTILE: HOSTILE},
        config={HOSTILE: HOSTILE},
        notes=[HOSTILE],
    )


@pytest.mark.parametrize(
    "subject",
    [
        report(),
        hostile_report(),
        report(rows=[], curves=[], maps=[], environment={}, config={}, notes=[]),
        report(rows=[row("x", few=NAN, few_label_std=NAN, linear=NAN, knn=NAN)]),
    ],
    ids=["usual", "hostile", "empty", "nan"],
)
def test_page_is_well_formed(subject: Report) -> None:
    root = parse(render(subject))
    assert [child.tag for child in root.children] == ["html"]
    assert [child.tag for child in root.children[0].children] == ["head", "body"]
    assert len(root.all("h1")) == 1


def every_node(node: Node) -> list[Node]:
    return [node, *(found for child in node.children for found in every_node(child))]


def test_page_refers_to_nothing_outside_itself() -> None:
    # An address in the data may be shown as text; nothing may make the browser fetch it.
    page = render(report(environment={"Source": "https://example.org/x"}))
    nodes = every_node(parse(page))
    assert not {"script", "link", "img", "iframe", "base", "use", "image"} & {n.tag for n in nodes}
    for node in nodes:
        for name, value in node.attrs.items():
            assert name not in {"src", "href", "xlink:href", "srcset", "data"}
            assert not name.startswith("on")
            assert "url(" not in value
            assert "//" not in value
    style = parse(page).all("style")[0].text
    assert not re.search(r"url\(|@import|//|@font-face", style)
    policy = [n.attrs["content"] for n in nodes if "Content-Security" in str(n.attrs)]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_text_is_shown_and_never_becomes_markup() -> None:
    page = render(hostile_report())
    root = parse(page)
    assert "<script" not in page
    assert root.all("script") == []
    assert root.all("h1")[0].text == HOSTILE
    head = root.all("table", "results")[0].all("tbody")[0].all("th")[0]
    assert head.text == HOSTILE * 2
    assert [caption.text for caption in root.all("figcaption")] == [HOSTILE, HOSTILE]
    assert {circle.all("title")[0].text for circle in root.all("circle")} == {HOSTILE}
    facts = root.all("table", "facts")[0]
    assert [facts.all("th")[0].text, facts.all("td")[0].text] == [HOSTILE, HOSTILE]
    assert f"Settings: {HOSTILE}: {HOSTILE}." in root.all("p")[0].text
    assert root.all("li")[-1].text == HOSTILE
    labels = [svg.attrs["aria-label"] for svg in root.all("svg", "loss")]
    assert labels == [f"Training loss of {HOSTILE} by epoch"]


def test_bold_marks_the_best_pretrained_method_of_each_column() -> None:
    page = render(report())
    assert bold(page, FEW) == ["beta"]
    assert bold(page, LINEAR) == ["alpha"]
    assert bold(page, KNN) == ["beta"]
    assert bold(page, SECONDS) == ["beta"]
    assert bold(page, SPEED) == ["beta"]
    assert bold(page, KIND) == []


def test_bold_goes_to_every_value_printed_like_the_best() -> None:
    page = render(report(rows=[row("a", knn=90.04), row("b", knn=90.01), row("c", knn=89.94)]))
    assert bold(page, KNN) == ["a", "b"]


def test_a_baseline_equal_to_the_best_is_not_bold() -> None:
    page = render(report(rows=[row("pixels", "baseline"), row("trained")]))
    assert bold(page, KNN) == ["trained"]


def test_baselines_alone_have_no_bold() -> None:
    page = render(report(rows=[row("pixels", "baseline")]))
    assert parse(page).all("b") == []


def test_numbers_are_shown_as_measured_to_one_decimal() -> None:
    line = cells(render(report()))["alpha"]
    assert [cell.text for cell in line] == [
        "plugin",
        "88.0 ± 1.5",
        "93.0",
        "91.0",
        "70.0",
        "1000.0",
    ]


def test_rows_are_sorted_by_few_label_accuracy_with_nan_last() -> None:
    rows = [row("nan", few=NAN), row("low", few=10.0), row("high", few=90.0), row("mid", few=50.0)]
    page = render(report(rows=rows))
    assert list(cells(page)) == ["high", "mid", "low", "nan"]
    names = [text.text for text in parse(page).all("svg", "bars")[0].all("text", "name")]
    assert names == ["high", "mid", "low", "nan"]


def test_missing_values_are_dashes_and_never_best() -> None:
    lost = row("lost", few=NAN, few_label_std=NAN, linear=NAN, knn=NAN, seconds=None,
               images_per_second=NAN)  # fmt: skip
    page = render(report(rows=[lost, row("found", "host")]))
    assert [cell.text for cell in cells(page)["lost"][1:]] == [DASH] * 5
    assert [bold(page, column) for column in range(FEW, SPEED + 1)] == [["found"]] * 5
    assert "nan" not in parse(page).all("body")[0].text


def test_nan_standard_deviation_leaves_the_mean() -> None:
    page = render(report(rows=[row("one draw", few=70.25, few_label_std=NAN)]))
    assert cells(page)["one draw"][FEW].text == "70.2"
    assert parse(page).all("line", "whisker") == []


def number(node: Node, name: str) -> float:
    return float(node.attrs[name])


def test_bars_and_whiskers_are_to_scale() -> None:
    chart = parse(bar_chart([Bar("a", "plugin", 50.0, 10.0), Bar("b", "host", NAN, 1.0)], "%"))
    origin = number(chart.all("line", "axis")[0], "x1")
    full = number(chart.all("line", "grid")[-1], "x1") - origin
    (rect,) = chart.all("rect")
    assert number(rect, "x") == pytest.approx(origin)
    assert number(rect, "width") == pytest.approx(0.5 * full, abs=0.2)
    whisker = chart.all("line", "whisker")[0]
    assert number(whisker, "x1") == pytest.approx(origin + 0.4 * full, abs=0.2)
    assert number(whisker, "x2") == pytest.approx(origin + 0.6 * full, abs=0.2)
    assert [text.text for text in chart.all("text", "value")] == ["50.0 ± 10.0", DASH]


def test_whiskers_stay_on_the_axis() -> None:
    chart = parse(bar_chart([Bar("a", "plugin", 99.0, 5.0), Bar("b", "host", 2.0, 5.0)], "%"))
    low = number(chart.all("line", "axis")[0], "x1")
    high = number(chart.all("line", "grid")[-1], "x1")
    for line in chart.all("line", "whisker"):
        assert low <= number(line, "x1") <= number(line, "x2") <= high


def test_long_names_are_cut_in_the_chart_but_kept_in_the_tooltip() -> None:
    chart = parse(bar_chart([Bar("x" * 200, "plugin", 50.0, 1.0)], "%"))
    name = chart.all("text", "name")[0].text
    assert len(name) < 40
    assert name.endswith("…")
    assert "x" * 200 in chart.all("title")[0].text


CURVES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "usual": (list(range(1, 41)), [3 / epoch for epoch in range(1, 41)]),
    "single": ([1], [2.5]),
    "single_at_zero": ([0], [0.0]),
    "constant": ([1, 2, 3], [4.0, 4.0, 4.0]),
    "constant_negative": ([1, 2], [-4.0, -4.0]),
    "gap": ([1, 2, 3, 4, 5], [5.0, NAN, 4.0, float("inf"), 3.0]),
    "huge": ([1, 2], [1e30, 3e37]),
    "tiny": ([1, 2], [1e-9, 3e-9]),
    "barely_moving": ([1, 2], [1e16, 1e16 + 2]),
    "numpy": (np.arange(1, 4), np.array([3, 2, 1], dtype=np.float32)),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", CURVES)
def test_loss_chart_has_monotone_ticks_and_stays_inside_its_axes(name: str) -> None:
    chart = parse(loss_chart(name, *CURVES[name]))
    for css, axis in (("xtick", "x"), ("ytick", "y")):
        ticks = chart.all("text", css)
        values = [float(tick.text) for tick in ticks]
        places = [number(tick, axis) for tick in ticks]
        assert 2 <= len(values) <= 9
        assert values == sorted(set(values))
        assert places == sorted(places, reverse=axis == "y")
    x_low, x_high = (number(chart.all("text", "xtick")[end], "x") for end in (0, -1))
    y_low, y_high = (number(chart.all("text", "ytick")[end], "y") - 4 for end in (-1, 0))
    points = [
        (float(x), float(y))
        for path in chart.all("path")
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.attrs["d"])
    ]
    assert len(points) == int(np.isfinite(np.asarray(CURVES[name][1], dtype=float)).sum())
    for x, y in points:
        assert x_low - 0.1 <= x <= x_high + 0.1
        assert y_low - 0.1 <= y <= y_high + 0.1


def test_a_falling_loss_is_drawn_falling() -> None:
    (path,) = parse(loss_chart("a", [1, 2, 3], [3.0, 2.0, 1.0])).all("path")
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path.attrs["d"])]
    assert heights == sorted(set(heights))
    assert len(heights) == 3


def test_lost_epochs_leave_gaps_and_lone_epochs_are_dots() -> None:
    chart = parse(loss_chart("a", [1, 2, 3, 4, 5], [5.0, 4.0, NAN, 3.0, NAN]))
    assert [path.attrs["d"].count("L") for path in chart.all("path")] == [1, 0]
    assert len(chart.all("path", "lone")) == 1


@pytest.mark.parametrize("losses", [[], [NAN], [NAN, float("inf")]])
def test_a_curve_without_any_finite_loss_says_so(losses: list[float]) -> None:
    chart = parse(loss_chart("a", list(range(len(losses))), losses))
    assert [text.text for text in chart.all("text")] == ["no finite loss recorded"]


def test_page_has_one_chart_per_curve_and_says_losses_do_not_compare() -> None:
    root = parse(render(report()))
    assert len(root.all("svg", "loss")) == 2
    assert "losses of different methods are not comparable" in root.all("body")[0].text


def test_map_has_one_circle_per_point_with_its_class() -> None:
    points = np.random.default_rng(1).normal(size=(57, 2))
    targets = np.arange(57) % 3
    names = ["ant", "bee", "cat"]
    page = render(report(maps=[FeatureMap("m", points, targets, names)]))
    root = parse(page)
    circles = root.all("circle")
    assert len(circles) == 57
    assert [circle.all("title")[0].text for circle in circles] == [names[t] for t in targets]
    assert [circle.attrs["class"] for circle in circles] == [f"c{t}" for t in targets]
    figure = root.all("figure")[-1]
    assert [item.text for item in figure.all("li")] == names
    assert [item.all("rect")[0].attrs["class"] for item in figure.all("li")] == ["c0", "c1", "c2"]
    colours = dict(re.findall(r"\.(c\d) \{ fill: (#\w{6})", root.all("style")[0].text))
    assert len(set(colours.values())) == 10


def test_map_keeps_orientation_and_equal_scales() -> None:
    points = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    page = render(report(maps=[FeatureMap("m", points, np.zeros(3, dtype=int), ["a"])]))
    origin, right, top = (
        (number(circle, "cx"), number(circle, "cy")) for circle in parse(page).all("circle")
    )
    assert right[0] > origin[0]
    assert right[1] == origin[1]
    assert top[1] < origin[1]
    assert top[0] == origin[0]
    assert right[0] - origin[0] == pytest.approx(4 * (origin[1] - top[1]), abs=0.3)


def test_collapsed_map_is_drawn() -> None:
    flat = FeatureMap("m", np.ones((5, 2)), np.zeros(5, dtype=int), ["a"])
    circles = parse(render(report(maps=[flat]))).all("circle")
    assert {(circle.attrs["cx"], circle.attrs["cy"]) for circle in circles} == {("160.0", "160.0")}


def test_points_without_finite_coordinates_are_counted() -> None:
    points = np.array([[0.0, 1.0], [NAN, 0.0], [1.0, float("inf")], [2.0, 2.0]])
    page = render(report(maps=[FeatureMap("m", points, np.zeros(4, dtype=int), ["a"])]))
    root = parse(page)
    assert len(root.all("circle")) == 2
    assert "2 points without finite coordinates left out" in root.all("figcaption")[-1].text


def test_intro_counts_the_methods_and_lists_the_settings() -> None:
    intro = parse(render(report(config={"epochs": "3", "seed": "7"}))).all("p")[0].text
    assert "1 method added by solo-ext, 1 method of solo-learn and 1 baseline" in intro
    assert "Settings: epochs: 3; seed: 7." in intro


def test_inconsistent_input_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        row("x", "other")
    with pytest.raises(ValueError, match="2 epochs but 1 losses"):
        Curve("x", [1, 2], [1.0])
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        FeatureMap("x", np.zeros((2, 2)), np.zeros(3, dtype=int), ["a"])
    with pytest.raises(ValueError, match="no class name"):
        FeatureMap("x", np.zeros((1, 2)), np.array([1]), ["a"])
    with pytest.raises(ValueError, match="at most 10"):
        FeatureMap("x", np.zeros((1, 2)), np.array([0]), [str(index) for index in range(11)])


def test_write_returns_the_path_and_leaves_only_the_report(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.html"
    assert write_report(report(), target) == target
    assert target.read_text(encoding="utf-8") == render(report())
    assert list(target.parent.iterdir()) == [target]


def test_failed_write_keeps_the_previous_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("previous")
    seen: list[Path] = []

    def refuse(source: Path, destination: Path) -> None:
        seen.append(Path(source))
        raise OSError("disk full")

    monkeypatch.setattr("solo_ext.demo.report.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_report(report(), target)
    assert target.read_text() == "previous"
    assert [source.parent for source in seen] == [tmp_path]
    assert list(tmp_path.iterdir()) == [target]
