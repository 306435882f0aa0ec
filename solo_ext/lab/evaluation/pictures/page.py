"""Maps as one interactive page that needs nothing beside it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path

from solo_ext.core.files import refuse_link
from solo_ext.lab.evaluation.pictures.packages import viz_package
from solo_ext.lab.evaluation.pictures.scatter import COLOURS, Map

_SHAPES = ("circle", "triangle-up", "square", "diamond", "triangle-down", "cross")
_TOOLS = [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]]
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>
:root {{ --ink: #1c1c1e; --ground: #ffffff; --line: #c9c9ce; --chosen: #e8eefc; }}
:root[data-theme="dark"] {{
  --ink: #e9e9ee; --ground: #17181c; --line: #4a4b52; --chosen: #2b3550;
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; height: 100vh; display: flex; flex-direction: column;
  font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--ground);
}}
header {{
  display: flex; flex-wrap: wrap; gap: 8px; align-items: baseline; padding: 12px 16px 4px;
}}
h1 {{ font-size: 17px; margin: 0; }}
p {{ margin: 0 auto 0 4px; opacity: 0.75; }}
button {{
  font: inherit; color: inherit; background: none; border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px; cursor: pointer;
}}
button[aria-pressed="true"] {{ background: var(--chosen); }}
main {{ flex: 1; min-height: 0; }}
main > div {{ height: 100%; }}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{about}</p>
{buttons}
<button id="theme" type="button">light / dark</button>
</header>
<main>{plot}</main>
<script type="application/json" id="points">{points}</script>
<script>
const map = document.getElementById("map");
const points = JSON.parse(document.getElementById("points").textContent);
const choices = [...document.querySelectorAll("button[data-map]")];
function show(name) {{
  choices.forEach(b => b.setAttribute("aria-pressed", String(b.dataset.map === name)));
  Plotly.restyle(map, {{ x: points[name].x, y: points[name].y }});
  Plotly.relayout(map, {{ "xaxis.autorange": true, "yaxis.autorange": true,
    "xaxis.title.text": points[name].axes[0], "yaxis.title.text": points[name].axes[1] }});
}}
choices.forEach(b => b.addEventListener("click", () => show(b.dataset.map)));
function theme(name) {{
  document.documentElement.dataset.theme = name;
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim();
  const ground = style.getPropertyValue("--ground").trim();
  const line = style.getPropertyValue("--line").trim();
  Plotly.relayout(map, {{ "font.color": ink, paper_bgcolor: ground, plot_bgcolor: ground,
    "xaxis.linecolor": line, "yaxis.linecolor": line }});
}}
const dark = matchMedia("(prefers-color-scheme: dark)");
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", e => theme(e.matches ? "dark" : "light"));
addEventListener("load", () => Plotly.Plots.resize(map));
document.getElementById("theme").addEventListener("click", () =>
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
</script>
</body>
</html>
"""


def write_page(
    maps: Mapping[str, Map],
    axes: Mapping[str, tuple[str, str]],
    title: str,
    about: str,
    file: Path,
) -> None:
    """Writes the maps of the same images as one page, plotly's script in it.

    Points say class and file; a click on a class hides it. Colours follow the reader's light or
    dark setting.

    Args:
        maps: by the name on its button; the first is shown.
        axes: labels of the axes, for maps whose axes mean something.
        title: of the page, plain text.
        about: a line beside it, plain text.
        file: the page.
    """
    graph = viz_package("plotly.graph_objects")
    name, first = next(iter(maps.items()))
    figure = graph.Figure()
    for place, label in enumerate(first.present):
        rows = first.targets == label
        # plotly reads tags in texts.
        shown = html.escape(first.classes[label])
        files = [html.escape(n) for n, own in zip(first.names, rows, strict=True) if own]
        figure.add_trace(
            graph.Scatter(
                x=_rounded(first, label)[0],
                y=_rounded(first, label)[1],
                mode="markers",
                name=shown,
                text=files,
                hovertemplate=f"<b>{shown.replace('%{', '% {')}</b><br>%{{text}}<extra></extra>",
                marker={
                    "size": 7 if len(first.points) <= 2000 else 5,
                    "opacity": 0.8,
                    "color": COLOURS[place % len(COLOURS)],
                    "symbol": _SHAPES[place // len(COLOURS) % len(_SHAPES)],
                },
            )
        )
    shown_axes = [{"text": text, "standoff": 8} for text in axes.get(name, ("", ""))]
    blank = {"showgrid": False, "zeroline": False, "showticklabels": False, "showline": True}
    figure.update_layout(
        template="none",
        margin={"l": 44, "r": 12, "t": 40, "b": 44},
        legend={"itemsizing": "constant", "font": {"size": 13}},
        xaxis={**blank, "mirror": True, "title": shown_axes[0]},
        yaxis={**blank, "mirror": True, "scaleanchor": "x", "title": shown_axes[1]},
    )
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id="map",
        config={"displaylogo": False, "responsive": True, "modeBarButtons": _TOOLS},
    )
    coordinates = {
        key: {
            "x": [_rounded(one, label)[0] for label in one.present],
            "y": [_rounded(one, label)[1] for label in one.present],
            "axes": axes.get(key, ("", "")),
        }
        for key, one in maps.items()
    }
    buttons = "\n".join(
        f'<button type="button" data-map="{html.escape(key)}" '
        f'aria-pressed="{str(key == name).lower()}">{html.escape(key)}</button>'
        for key in maps
    )
    page = _PAGE.format(
        title=html.escape(title),
        about=html.escape(about),
        buttons=buttons if len(maps) > 1 else "",
        plot=plot,
        points=json.dumps(coordinates).replace("<", "\\u003c"),
    )
    refuse_link(file).write_text(page, encoding="utf-8")


def _rounded(what: Map, label: int) -> tuple[list[float], list[float]]:
    rows = what.points[what.targets == label].round(4)
    return rows[:, 0].tolist(), rows[:, 1].tolist()
