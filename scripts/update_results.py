"""Writes tables of the documentation and the pictures from records.

python scripts/update_results.py    # from results/cifar10_slots, claims, digits, cifar10-cpu, ...
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from scipy import stats

from solo_ext.core.files import read_jsonl, write_text
from solo_ext.lab.evaluation.label_free import Views
from solo_ext.lab.experiments.records import SETTINGS
from solo_ext.lab.experiments.report import (
    DASH,
    claims_remark,
    claims_table,
    mean_and_deviation,
    mean_and_interval,
)
from solo_ext.lab.experiments.results import Place, Results, read_results
from solo_ext.lab.experiments.verdicts import verdicts
from solo_ext.lab.pages import Table, escaped, markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "index.md"
README = ROOT / "README.md"
PUBLISHED = ROOT / "results" / "published.csv"
SLOTS = ROOT / "results" / "cifar10_slots"
FOLDERS = [ROOT / "results" / name for name in ("digits", "cifar10-cpu")]
CLAIMS = ROOT / "results" / "claims"
WITHOUT_LABELS = ROOT / "docs" / "guides" / "measures-without-labels.md"
DISTIL = ROOT / "docs" / "guides" / "distil.md"
LABEL_FREE = ROOT / "results" / "label_free"
LABEL_FREE_CLUSTERS = ROOT / "results" / "label_free_clusters"
DISTILLATION = ROOT / "results" / "distillation_imagenette"
PEER = "peer.jsonl"
"""What ``results/distillation_imagenette/peer.py`` wrote."""
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FIRST = "a"
"""The stage that has to be whole before its picture is that of the README."""
ANCHORS = (("lightly", "128", "200"), ("solo-learn", "256", "1000"))
"""Published rows that stand beside ours: library, batch and epochs; ResNet-18 on CIFAR-10."""
_NAMES = {
    "linear": ("Linear", "linear_top1"),
    "knn": ("kNN, k 20", ""),
    "knn_200": ("kNN, k 200", "knn_top1"),
}
"""Of a score: the head of its column, and its column in the published rows."""
MEASURES = 2
"""How many of the headline's scores the page shows."""


def files() -> dict[Path, str]:
    """What the records say."""
    slots, digits = read_results(SLOTS), read_results(FOLDERS[0])
    root, place = PAGE.parent, first_place(slots)
    pictures = {root / "digits.svg": picture(digits, digits.places()[0])}
    shown = (
        "![Linear probes on digits, five seeds: methods of this package in orange]({}digits.svg)"
    )
    if place is not None:
        pictures[root / "cifar10.svg"] = picture(slots, place)
        words = "Linear probes on CIFAR-10, ResNet-18: methods of this package in orange"
        shown = f"![{words}]({{}}cifar10.svg)"
    parts = [shown.format(""), slots_section(slots, root), contents(CLAIMS, FOLDERS, root)]
    readme = updated(README.read_text(), shown.format("docs/benchmarks/"))
    return {
        PAGE: updated(PAGE.read_text(), "\n\n".join(parts)),
        README: readme,
        WITHOUT_LABELS: updated(
            WITHOUT_LABELS.read_text(),
            label_free_section(read_results(LABEL_FREE), read_results(LABEL_FREE_CLUSTERS)),
        ),
        DISTIL: updated(DISTIL.read_text(), distillation_section(DISTILLATION)),
        **pictures,
    }


def updated(page: str, content: str) -> str:
    """The page with other content between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"a page needs one line {BEGIN!r}, and one {END!r} after it"
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def first_place(slots: Results) -> Place | None:
    """Where the first stage was run, if all of its runs have records."""
    stage = slots.settings.stages[FIRST]
    (dataset,) = slots.settings.datasets
    place = Place(dataset, stage.budget)
    whole = all(seed in slots.runs(place, row) for row in stage.rows for seed in stage.seeds)
    return place if whole else None


def slots_section(slots: Results, root: Path) -> str:
    """The one table of CIFAR-10 whole: ours, the built-ins', and what libraries report."""
    link = Path(os.path.relpath(SLOTS.resolve(), root.resolve())).as_posix()
    return "\n\n".join(
        [
            f"**CIFAR-10, all images, ResNet-18** ([report]({link}/report.md))",
            markdown_table(slots_table(slots, published())),
            "Accuracies are in percent. With several seeds they are mean ± deviation. The highest "
            "mean of each budget is bold, if no run of the budget is missing. *Over its base* is "
            "the difference in the linear probe, paired by seed; with several seeds its 95 % "
            "interval follows. Minutes are those of training. Memory is that of the GPU. "
            "`rehearsal` trains a network of half the width on a CPU core. It only shows that the "
            "plan runs: do not rank methods by it. Reported rows are numbers of other libraries, "
            "for a ResNet-18 on the original images. lightly used batches of 128 and one seed, and "
            "reports the best epoch. solo-learn used batches of 256, and reports the classifier "
            "that is trained beside the network "
            f"([sources]({link.removesuffix('cifar10_slots')}published.csv)).",
        ]
    )


def published() -> list[dict[str, str]]:
    """Rows of libraries for CIFAR-10 with a ResNet-18, in the order of the anchors."""
    with PUBLISHED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == "CIFAR-10"]
    keys = ("library", "batch", "epochs")
    return [r for anchor in ANCHORS for r in rows if tuple(r[k] for k in keys) == anchor]


def slots_table(slots: Results, anchors: Sequence[Mapping[str, str]]) -> Table:
    """For each row what was measured, what is missing, and what libraries report, line by line."""
    (dataset,) = slots.settings.datasets
    stages = [s for s in slots.settings.stages.values() if s.near is None]
    lines: list[list[str]] = []
    bold = set()
    for row in slots.settings.rows:
        places = dict.fromkeys(Place(dataset, s.budget) for s in stages if row in s.rows)
        for place in places:
            if slots.runs(place, row):
                best = [] if slots.missing(place) else slots.measures
                bold |= {
                    (len(lines), 2 + n) for n, m in enumerate(best) if row in slots.best(place, m)
                }
                lines.append(_slot(slots, place, row))
        if absent := [_epochs(slots, p) for p in places if not slots.runs(p, row)]:
            rest = [DASH] * (len(slots.measures) + 1)
            lines.append([slots.label(row), ", ".join(absent), "missing", *rest])
        lines += [_anchor(a, slots.measures) for a in anchors if a["registered"] == row]
    names = (_NAMES[measure][0] for measure in slots.measures)
    head = ["Method", "Epochs", *names, "Over its base", "Cost"]
    return Table(head, lines, numeric=frozenset(range(2, len(head) - 1)), bold=frozenset(bold))


def _epochs(slots: Results, place: Place) -> str:
    """Epochs of a budget, and its name if that is not the number."""
    changes = slots.settings.budgets[place.budget]
    asked = next(c.partition("=")[2] for c in changes if c.startswith("max_epochs="))
    return asked if asked == place.budget else f"{asked} ({place.budget})"


def _slot(slots: Results, place: Place, row: str) -> list[str]:
    held = list(slots.runs(place, row).values())
    seeds = f", {len(held)} seeds" if len(held) > 1 else ""
    scores = [mean_and_deviation(slots.mean(place, row, m)) for m in slots.measures]
    (base, *_) = [*slots.settings.rows[row].bases, None]
    gain = None if base is None else slots.difference(place, row, base, slots.measures[0])
    over = DASH if gain is None else f"{mean_and_interval(gain)}, {base}"
    seconds = [r["seconds"] for r in held if r["seconds"] is not None]
    cuda = max((r["memory"] or {}).get("cuda") or 0 for r in held)
    cost = [f"{sum(seconds) / len(seconds) / 60:.1f} min"] if seconds else []
    cost += [f"{cuda / 2**30:.1f} GiB"] if cuda else []
    cost += sorted({gpu for r in held for gpu in r["environment"]["gpus"]})
    return [slots.label(row), _epochs(slots, place) + seeds, *scores, over, ", ".join(cost) or DASH]


def _anchor(row: Mapping[str, str], measures: Sequence[str]) -> list[str]:
    scores = [row.get(_NAMES[measure][1]) or DASH for measure in measures]
    cost = [f"{row['time_min']} min"] if row["time_min"] else []
    cost += [f"{row['peak_gpu_gb']} GB"] if row["peak_gpu_gb"] else []
    cost += [row["hardware"].removeprefix("1x ")] if cost else []
    name = f"{row['registered']}, reported by {row['library']}"
    return [name, f"{int(row['epochs']):,}", *scores, DASH, ", ".join(cost) or DASH]


def contents(experiments: Path, folders: Sequence[Path], root: Path) -> str:
    """The verdicts of all experiments in a folder, where there are any, before the tables."""
    results = [read_results(file.parent) for file in sorted(experiments.glob(f"*/{SETTINGS}"))]
    if not results:
        return tables(folders, root)
    link = Path(os.path.relpath(experiments.resolve(), root.resolve())).as_posix()
    head = f"**Claims of papers**, each by its own experiment ([report]({link}/report.md))"
    claims = markdown_table(claims_table(results))
    return "\n\n".join([head, claims, claims_remark(results), tables(folders, root)])


def tables(folders: Sequence[Path], root: Path) -> str:
    """A compact table for each folder: the first two scores of every row, by data set.

    Args:
        folders: that ``solo-ext benchmark run`` wrote.
        root: folder of the page, that links are relative to.
    """
    parts = []
    for folder in folders:
        results = read_results(folder)
        link = Path(os.path.relpath(folder.resolve(), root.resolve()))
        parts += [
            f"**{escaped(results.settings.title)}** ([report]({link.as_posix()}/report.md))",
            markdown_table(_compact(results)),
            escaped(_remarks(results)),
        ]
    return "\n\n".join(parts)


def _compact(results: Results) -> Table:
    columns = [
        (place, measure)
        for place in results.places()
        for measure in results.measures[:MEASURES]
        if any(results.scores(place, row, measure) for row in results.rows(place))
    ]
    rows = [
        row
        for row in results.settings.rows
        if any(results.runs(place, row) for place, _ in columns)
    ]
    lines = []
    for row in rows:
        cells = []
        for place, measure in columns:
            found = results.mean(place, row, measure)
            cells.append(mean_and_deviation(found, len(results.settings.seeds)))
        lines.append([results.label(row), *cells])
    one = len(results.places()) == 1
    head = [
        "",
        *(measure if one else f"{results.title(place)}: {measure}" for place, measure in columns),
    ]
    bold = frozenset(
        (rows.index(row), column)
        for column, (place, measure) in enumerate(columns, 1)
        for row in results.best(place, measure)
    )
    return Table(head, lines, frozenset(range(1, len(head))), bold)


def _remarks(results: Results) -> str:
    names = ", ".join(results.title(place) for place in results.places())
    words = [
        f"{names}. Accuracies are in percent, mean ± deviation over seeds. n is the number of "
        f"seeds if it is not {len(results.settings.seeds)}. The highest mean is bold. Look at the "
        "deviations before you rank methods."
    ]
    if answers := Counter(verdict.answer for verdict in verdicts(results)):
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
        words.append(f"Claims of papers: {counts}.")
    return " ".join(words)


DRAWS = 10_000
"""Bootstrap samples of the runs behind an interval."""


def label_free_section(results: Results, clusters: Results) -> str:
    """How measures without labels rank the runs that a linear probe ranks."""
    (place,) = results.places()
    count = len(results.rows(place))
    return "\n\n".join(
        [
            markdown_table(label_free_table(results)),
            f"The numbers are Spearman's rank correlations with the linear probe, over {count} "
            f"runs. In brackets is the 95 % interval of {DRAWS:,} bootstrap samples of the runs. "
            "The correlation is 1 if both rank the runs alike, 0 if the measure says nothing, and "
            "below 0 if it prefers the worse runs. A column with the name of a method compares "
            "settings of this method. The column `methods` compares one run of each method, with "
            "the settings of its config. The number of runs is in brackets. For the column `lost`, "
            "take the run that the measure likes best: it says by how many points of the linear "
            "probe this run is below the best run (the mean and the largest value over the columns "
            "of a method). For `alpha_req`, the distance from 1 is ranked. kNN needs labels; it is "
            "there for comparison ([records](../../results/label_free/report.md)).",
            "This table has the two measures of PCL's clusters, over the same settings of PCL "
            "([records](../../results/label_free_clusters/report.md)):",
            markdown_table(label_free_table(clusters)),
        ]
    )


def label_free_table(results: Results) -> Table:
    """Rank correlations of every measure with the linear probe, within and between methods."""
    (place,) = results.places()
    settings, by_config = results.settings.rows, dict[str, list[str]]()
    for row in results.rows(place):
        by_config.setdefault(settings[row].config or row, []).append(row)
    within = {config: rows for config, rows in by_config.items() if len(rows) > 2}
    between = [row for row in results.rows(place) if not settings[row].changes]
    columns = [(f"{config} ({len(rows)})", rows) for config, rows in within.items()]
    if len(between) > 2:
        columns.append((f"methods ({len(between)})", between))

    def scores(rows: Sequence[str], measure: str) -> list[float]:
        return [float(np.mean(list(results.scores(place, r, measure).values()))) for r in rows]

    lines = []
    probe, *measures = results.measures
    for measure in measures:
        sign = goodness(measure)
        name = "kNN" if measure == "knn" else measure.partition("_")[2]
        cells, missed = [name], []
        for _, rows in columns:
            linear, goods = scores(rows, probe), [sign(x) for x in scores(rows, measure)]
            cells.append(correlation(goods, linear))
            if rows is not between:
                missed.append(max(linear) - linear[int(np.argmax(goods))])
        lines.append([*cells, f"{np.mean(missed):.1f}, {max(missed):.1f}"])
    heads = ["", *(head for head, _ in columns), "lost"]
    return Table(heads, lines, frozenset(range(1, len(heads))))


def goodness(measure: str) -> Callable[[float], float]:
    """What is higher for the run that a measure of ``views`` prefers."""
    match Views.not_higher.get(measure.removeprefix("views_")):
        case "lower":
            return lambda value: -value
        case "neither":
            return lambda value: -abs(value - 1)
        case _:
            return lambda value: value


def correlation(first: Sequence[float], second: Sequence[float]) -> str:
    """Spearman's correlation with its bootstrap interval, such as ``0.85 (0.42 to 0.98)``."""
    pairs = np.array([first, second])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(DRAWS, pairs.shape[1]))
    ranks = stats.rankdata(pairs[:, drawn], axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    spread = np.sqrt((ranks**2).sum(-1).prod(0))
    # A sample whose values are all equal has no ranks to compare.
    samples = (ranks[0] * ranks[1]).sum(-1)[spread > 0] / spread[spread > 0]
    low, high = np.quantile(samples, (0.025, 0.975))
    return f"{stats.spearmanr(first, second).statistic:.2f} ({low:.2f} to {high:.2f})"


def distillation_section(folder: Path) -> str:
    """A small network alone and distilled, by this package and by lightly-train."""
    results = read_results(folder)
    (place,) = results.places()
    (peer,) = read_jsonl(folder / PEER)

    def line(label: str, scores: Mapping[str, float], seconds: float) -> list[str]:
        shown = [f"{scores[measure]:.1f}" for measure in results.measures]
        return [label, *shown, f"{seconds / 60:.1f}"]

    lines = []
    for row in results.rows(place):
        (record,) = results.runs(place, row).values()
        lines.append(line(results.label(row), record["scores"], record["seconds"] or 0))
    lines.append(line(f"lightly-train {peer['version']}", peer["scores"], peer["seconds"]))
    names = [_NAMES[measure][0] for measure in results.measures]
    return markdown_table(Table(["", *names, "minutes"], lines, frozenset((1, 2, 3))))


ROW, LEFT, WIDTH = 20, 250, 760
"""Pixels of the picture: height of a row, width of its labels, width in all."""
OURS, OTHERS = "#c2410c", "#37474f"


def picture(results: Results, place: Place) -> str:
    """A dot and a line of one deviation to each side for every row's first score, as SVG."""
    measure = results.measures[0]
    means = {row: results.mean(place, row, measure) for row in results.rows(place)}
    found = {row: mean for row, mean in means.items() if mean is not None}
    rows = sorted(found, key=lambda row: -found[row].mean)
    low, high = 5 * math.floor(min(x.mean - (x.deviation or 0) for x in found.values()) / 5), 100
    height = ROW * len(rows) + 60

    def across(score: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 30) * (score - low) / (high - low):.1f}"

    title = f"{results.title(place)}: {measure} accuracy in percent, mean and deviation over seeds"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#f5f6fa"/>',
        f'<text x="{LEFT}" y="22" fill="#37474f">{escape(title)}</text>',
    ]
    for score in range(low, high + 1, 5):
        x = across(score)
        lines += [
            f'<line x1="{x}" y1="32" x2="{x}" y2="{height - 24}" stroke="#dfe2ec"/>',
            f'<text x="{x}" y="{height - 8}" fill="#37474f" text-anchor="middle">{score}</text>',
        ]
    for number, row in enumerate(rows):
        y, score = 46 + ROW * number, found[row]
        color = OURS if results.kind(place, row) == "plugin" else OTHERS
        name = escape(results.label(row))
        lines.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" fill="{color}" text-anchor="end">{name}</text>'
        )
        if score.deviation:
            left, right = (across(score.mean + sign * score.deviation) for sign in (-1, 1))
            lines.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="{color}"/>')
        lines.append(f'<circle cx="{across(score.mean)}" cy="{y}" r="4" fill="{color}"/>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    for file, text in files().items():
        write_text(file, text)
