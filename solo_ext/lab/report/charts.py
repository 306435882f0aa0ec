"""Charts of a run's page in Vega-Lite: curves over epochs, the map of the embeddings."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solo_ext.core.errors import UserError
from solo_ext.lab.evaluation.pictures import FeatureMap, Method
from solo_ext.lab.evaluation.sample import Sample
from solo_ext.lab.pages import Chart, data_url
from solo_ext.lab.report.thumbnails import Thumbnails

Curve = Sequence[tuple[float, float]]
"""Points (epoch, value)."""
MOST_POINTS = 2000
_MOST_OF_A_CURVE = 400
_LEGEND = 20
_FONT = "system-ui, sans-serif"
# Like Vega's `tableau20`, its dark colours first, so that ten groups are told apart well.
_COLOURS = [
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2"),
    *("#eeca3b", "#b279a2", "#9d755d", "#ff9da6", "#79706e"),
    *("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9", "#83bcb6"),
    *("#b79a20", "#439894", "#d67195", "#d8b5a5", "#bab0ac"),
]
# Texts and axes take their colours from the page's style sheet, which knows light and dark.
_CONFIG: dict[str, Any] = {
    "autosize": {"type": "fit-x", "contains": "padding"},
    "background": None,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "gridOpacity": 1,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "symbolLimit": _LEGEND, "labelLimit": 140},
    "range": {"category": _COLOURS},
}
_LINES = ("#4c8bd6", "#e8833a", "#3aa981", "#b56cc9", "#d15b62")


def library() -> Any:
    """Altair, which writes the specifications.

    Raises:
        UserError: it is not installed.

    >>> library().__name__
    'altair'
    """
    try:
        import altair
    except ModuleNotFoundError:
        raise UserError(
            "altair, which draws the charts of a page, is not installed; "
            "pip install 'solo-ext[report]'"
        ) from None
    return altair


def curves_chart(curves: Mapping[str, Curve], caption: str) -> Chart:
    """Lines over epochs; long ones are thinned to 400 points, their last point kept.

    >>> chart = curves_chart({"loss": [(1.0, 2.5), (2.0, 2.25)]}, "Loss")
    >>> chart.spec["mark"]["type"], chart.spec["encoding"]["y"]["field"]
    ('line', 'value')
    """
    alt = library()
    rows = [
        {"epoch": round(x, 4), "value": y, "curve": name}
        for name, points in curves.items()
        for x, y in _thinned(points)
    ]
    single = len(curves) == 1
    colour = alt.Color(
        "curve:N",
        sort=list(curves),
        scale=alt.Scale(range=list(_LINES)),
        legend=None if single else alt.Legend(title=None, orient="top", columns=2),
    )
    drawn = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(
            point={"size": 22} if max(map(len, curves.values())) <= 40 else False, strokeWidth=2
        )
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1, grid=False)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=colour,
            tooltip=[
                alt.Tooltip("curve:N", title="logged"),
                alt.Tooltip("epoch:Q", format=".4~g"),
                alt.Tooltip("value:Q", format=".4~g"),
            ],
        )
        .properties(width="container", height=190)
    )
    return Chart(_spec(drawn), caption)


def _thinned(points: Curve) -> Curve:
    step = -(-len(points) // _MOST_OF_A_CURVE)
    return points[(len(points) - 1) % step :: step]


def _spec(chart: Any) -> dict[str, Any]:
    return dict(chart.to_dict()) | {"config": _CONFIG}


def map_method() -> Method:
    """UMAP where it is installed, else PCA.

    >>> map_method() in ("umap", "pca")
    True
    """
    return "umap" if importlib.util.find_spec("umap") is not None else "pca"


def map_chart(
    sample: Sample, thumbnails: Thumbnails, most_bytes: int, method: Method, seed: int = 0
) -> Chart:
    """The embeddings in two dimensions; each point shows its picture and name under the pointer.

    The layout is that of ``solo-ext eval map``. At most 2000 images are drawn, fewer where their
    thumbnails would not fit into ``most_bytes``.

    >>> images = Sample(list("abcd"), np.eye(4), lambda row: 1 / 0)
    >>> map_chart(images, Thumbnails(images), 1000, "pca").caption
    'PCA of 4 images: component 1 (33% of variance), component 2 (33%)'
    """
    alt, n = library(), len(sample)
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(n)[:MOST_POINTS])
    side, room = thumbnails.largest_side(rows, most_bytes)
    if room < len(rows):
        rows = np.sort(rng.permutation(rows)[:room])
    x = np.asarray(sample.embeddings[rows], dtype=np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True).clip(1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        points, axes = FeatureMap(methods=[method], seed=seed).points(x, method)
    points = _in_unit_square(points)
    groups = _groups(sample.take(rows))
    values = [
        {"x": round(float(a), 4), "y": round(float(b), 4), "title": sample.names[row]}
        | ({"image": data_url(image)} if image else {})
        | {f"c{i}": of[place] for i, of in enumerate(groups.values())}
        for place, (row, (a, b), image) in enumerate(
            zip(rows.tolist(), points, thumbnails.encode(rows, side), strict=True)
        )
    ]
    names = list(groups)
    hover = alt.selection_point(name="hover", on="pointerover", clear="pointerout", empty=False)
    view = alt.selection_interval(
        name="view",
        bind="scales",
        # A wheel or a finger scrolls the page.
        translate="[mousedown, window:mouseup] > window:mousemove!",
        zoom="wheel![event.ctrlKey]",
    )
    chart = alt.Chart(alt.Data(values=values))
    colour: Any = alt.value(_LINES[0])
    if groups:
        fields = [f"c{i}" for i in range(len(names))]
        chosen = alt.param(
            name="colour",
            value=fields[0],
            bind=alt.binding_select(options=fields, labels=names, name="Colour"),
        )
        # As wide as three columns are on a phone.
        legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=90)
        colour = alt.Color("group:N", legend=legend)
        chart = chart.transform_calculate(group="datum[colour]").add_params(chosen)
    drawn = (
        chart.mark_circle(opacity=0.8)
        .encode(
            x=alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.02, 1.02])),
            y=alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.02, 1.02])),
            color=colour,
            size=alt.condition(hover, alt.value(220), alt.value(44)),
            tooltip=[
                alt.Tooltip("title:N", title="title"),
                alt.Tooltip("image:N", title="image"),
                *(alt.Tooltip(f"c{i}:N", title=name) for i, name in enumerate(names)),
            ],
        )
        .add_params(hover, view)
        .properties(width="container", height=520)
    )
    named = ", ".join(filter(None, axes))
    of = f"{len(rows):,} of {n:,} images" if len(rows) < n else f"{n:,} images"
    title = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}[method]
    return Chart(_spec(drawn), f"{title} of {of}" + (f": {named}" if named else ""))


def _in_unit_square(points: NDArray[Any]) -> NDArray[np.float64]:
    """Scales both coordinates alike, and centres them."""
    low, high = points.min(0), points.max(0)
    return np.asarray(0.5 + (points - (low + high) / 2) / max(float((high - low).max()), 1e-12))


def _groups(sample: Sample) -> dict[str, list[Any]]:
    """What colours the points: the classes, and the clusters, the coarsest granularity first."""
    found: dict[str, list[Any]] = {}
    if any(label is not None for label in sample.labels):
        found["class"] = ["none" if label is None else label for label in sample.labels]
    for k, clusters in sorted(sample.clusters.items()):
        found[f"{k} clusters"] = clusters.assignments.tolist()
    return found
