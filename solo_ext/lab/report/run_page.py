"""Writes the page of a run from its directory and its embedded images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solo_ext.core.errors import UserError
from solo_ext.core.files import read_jsonl, read_text, write_text
from solo_ext.lab.evaluation.context import Progress
from solo_ext.lab.evaluation.embed import embed_sample
from solo_ext.lab.evaluation.pictures import Method
from solo_ext.lab.evaluation.sample import Sample, shown
from solo_ext.lab.evaluation.suite import RECORD, headline_cards, words
from solo_ext.lab.pages import (
    Block,
    Card,
    Cards,
    Charts,
    Fold,
    Paragraph,
    Section,
    Table,
    render_page,
)
from solo_ext.lab.report.charts import Curve, curves_chart, library, map_chart, map_method
from solo_ext.lab.report.galleries import Galleries
from solo_ext.lab.report.thumbnails import Thumbnails
from solo_ext.lab.training.epoch_log import read_epochs
from solo_ext.lab.training.progress import duration
from solo_ext.lab.training.run_dir import ENVIRONMENT, METRICS, read_config
from solo_ext.lab.training.watch import METRIC as SPREAD
from solo_ext.lab.training.watch import UNREADABLE

PAGE = "report.html"
_PICTURE_BYTES, _MAP_BYTES = 4_500_000, 3_200_000
"""Room for all thumbnails and for those of the map; encoded as text they take a third more."""
_FEWEST_OF_A_MAP = 4
_CLASSIFIER = ("train_class_loss", "train_acc1", "train_acc5", "val_loss", "val_acc1", "val_acc5")
_MOST_CARDS = 8


def report(
    run: str | Path,
    images: Sequence[str | Path] = (),
    *,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    samples: int = 5000,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Path:
    """Embeds images of a run, and writes its page.

    Args:
        run: a run directory of ``solo-ext pretrain``.
        images: folders of images, or one list; by default the run's training images.
        out: as for :func:`report_run`, as are ``seed`` and ``progress``.
        settings: as for :func:`~solo_ext.lab.evaluation.embed.embed`.
        samples: most images that are embedded.

    Returns:
        The file.

    Raises:
        UserError: as :func:`report_run`; the images or the checkpoint cannot be read.

    >>> report("nowhere")
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    run_dir = Path(run)
    read_config(run_dir)
    library()
    sample = embed_sample(run_dir, images, settings, samples=samples, seed=seed, progress=progress)
    return report_run(run_dir, sample, out=out, seed=seed, progress=progress)


def report_run(
    run_dir: Path,
    sample: Sample | None = None,
    *,
    out: Path | None = None,
    method: Method | None = None,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Path:
    """Writes the page of a run: one HTML file below 10 MB that loads nothing.

    Args:
        run_dir: written by ``solo-ext pretrain``; numbers, curves, settings and environment come
            from its files.
        sample: images with their embeddings; without them the page has no map and no pictures.
        out: file of the page; null: ``report.html`` in the run directory.
        method: of the map; null: UMAP where it is installed, else PCA.
        seed: of the samples and of the map.
        progress: called with the task, how many parts of it are done, and how many it has.

    Returns:
        The file.

    Raises:
        UserError: the folder is no run directory, or what draws the charts is not installed.

    >>> report_run(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    config = read_config(run_dir)
    library()
    lines = [_numbers(line) for line in read_jsonl(run_dir / METRICS)]
    pictures: list[Section] = []
    if sample is not None:
        finite = np.flatnonzero(np.isfinite(sample.embeddings).all(1))
        if len(finite) < len(sample):
            # A run whose loss became infinite leaves such embeddings.
            count = len(sample) - len(finite)
            text = f"{count:,} of {len(sample):,} embeddings are not finite and left out below."
            pictures.append(Section("", [Paragraph(text, "wrong")]))
            sample = sample.take(finite)
        progress("report", 0, 3)
        if len(sample):
            pictures += _picture_sections(sample, method or map_method(), seed, progress)
    curves = [*_curve_sections(lines)]
    sections = [
        Section("", [Cards([*_headline_cards(config, lines, read_epochs(run_dir), sample)])]),
        *_evaluations(run_dir),
        *curves,
        *pictures,
        _about(run_dir, config),
    ]
    title = shown(str(config.get("name") or run_dir.resolve().name))
    file = out or run_dir / PAGE
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render_page(title, sections, subtitle=_subtitle(run_dir, config)))
    progress("report", 3, 3)
    return file


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _subtitle(run_dir: Path, config: Mapping[str, Any]) -> str:
    backbone = config.get("backbone")
    name = backbone.get("name") if isinstance(backbone, dict) else None
    told = [config.get("method"), name, run_dir.resolve().name]
    return shown(", ".join(str(one) for one in told if one))


def _curves(lines: Sequence[Mapping[str, float]]) -> dict[str, Curve]:
    """All logged numbers as points (epochs done, value), of epochs rather than of steps."""
    epochs = [
        (line["step"] + 1, line["epoch"] + 1) for line in lines if {"step", "epoch"} <= line.keys()
    ]
    steps, done = max(epochs, default=(1.0, 1.0))
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        place = line.get("epochs_done", (line.get("step", 0.0) + 1) * done / steps)
        for key, value in line.items():
            if key not in ("step", "seconds", "epoch", "epochs_done"):
                found.setdefault(key, []).append((place, value))
    for key in [key for key in found if key.endswith("_epoch")]:
        found[key.removesuffix("_epoch")] = found.pop(key)
        found.pop(f"{key.removesuffix('_epoch')}_step", None)
    return {key.removesuffix("_step"): points for key, points in found.items()}


def _losses(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """The losses that are trained, by their names without ``train_``."""
    return {
        key.removeprefix("train_").removesuffix("_loss"): points
        for key, points in curves.items()
        if key.startswith("train_") and key.endswith("_loss") and key not in _CLASSIFIER
    }


def _headline_cards(
    config: Mapping[str, Any],
    lines: Sequence[Mapping[str, float]],
    epochs: Sequence[Mapping[str, Any]],
    sample: Sample | None,
) -> Iterator[Card]:
    curves = _curves(lines)
    if sample is not None:
        count = np.shape(sample.embeddings)
        yield Card("Images", f"{count[0]:,}", f"embedded in {count[1]:,} dimensions")
    done = max((max(x.get("epochs_done", 0), x.get("epoch", -1) + 1) for x in lines), default=0)
    if done:
        planned = config.get("max_epochs")
        of = f"of {planned:,}" if isinstance(planned, int) and planned != done else ""
        yield Card("Epochs", f"{done:,.0f}", of)
    seconds = max((line.get("seconds", 0.0) for line in lines), default=0.0)
    if seconds:
        yield Card("Time", duration(seconds), "evaluations included")
    if (trained := sum(epoch["seconds"] for epoch in epochs)) > 0:
        speed = sum(epoch["images"] for epoch in epochs) / trained
        yield Card("Images/s", f"{speed:,.0f}", "of training, without evaluations")
    elif seconds and (batch := _batch(config)):
        steps = max(line.get("step", -1.0) + 1 for line in lines)
        yield Card("Images/s", f"{steps * batch / seconds:,.0f}", "evaluations included")
    for kind, label in (("resident", "Peak memory"), ("cuda", "Peak GPU memory")):
        if peak := max((_numbers(epoch).get(kind, 0) for epoch in epochs), default=0):
            yield Card(label, f"{peak / 2**30:.2f} GiB", "of the first process")
    for name, points in [*_losses(curves).items()][:3]:
        yield Card(f"{_sentence(name)} loss", f"{points[-1][1]:.4g}", "last epoch")
    if points := curves.get(SPREAD, ()):
        yield Card("Spread", f"{points[-1][1]:.2f}", "1 isotropic, 0 collapsed")
    online = {key: points for key, points in curves.items() if key.startswith("online_")}
    for key, points in [*online.items()][:_MOST_CARDS]:
        name = _sentence(key.removeprefix("online_"))
        yield Card(name, f"{points[-1][1]:.4g}", f"after {points[-1][0]:g} epochs")


def _batch(config: Mapping[str, Any]) -> int | None:
    """Images of an optimiser step, if the config says how many."""
    optimizer = config.get("optimizer")
    batch = optimizer.get("batch_size") if isinstance(optimizer, dict) else None
    devices = config.get("devices", 1)
    count = len(devices) if isinstance(devices, list) else devices
    parts = [batch, count, config.get("accumulate_grad_batches", 1), config.get("num_nodes", 1)]
    known = [int(part) for part in parts if str(part).isdecimal()]
    return math.prod(known) if len(known) == len(parts) else None


def _words(key: str) -> str:
    return shown(words(key))


def _sentence(key: str) -> str:
    """The words of a key with a capital, but names such as `kNN` as they are."""
    text = _words(key)
    return text if text[:3] in ("kNN", "mAP", "alp") else text[:1].upper() + text[1:]


def _evaluations(run_dir: Path) -> Iterator[Section]:
    """The numbers of ``solo-ext eval suite``, if it ran on this run."""
    try:
        entries = json.loads(read_text(run_dir / RECORD))["entries"]
        cards = headline_cards(entries)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
        return
    if cards.items:
        remark = "The first number of each protocol of solo-ext eval suite, on the test split."
        yield Section("Evaluation", [cards, Paragraph(remark, "soft")])


def _curve_sections(lines: Sequence[Mapping[str, float]]) -> Iterator[Section]:
    curves = _curves(lines)
    charts = []
    if losses := {k: v for k, v in _losses(curves).items() if len(v) > 1}:
        named = {_words(name): points for name, points in losses.items()}
        single = len(named) == 1
        charts.append(curves_chart(named, f"{_sentence(*named)} loss" if single else "Losses"))
    if len(curves.get(SPREAD, ())) > 1:
        caption = "Spread of a batch's embeddings: 1 isotropic, 0 collapsed"
        charts.append(curves_chart({"spread": curves[SPREAD]}, caption))
    for key, points in curves.items():
        if key.startswith("online_") and len(points) > 1:
            name = _sentence(key.removeprefix("online_"))
            charts.append(curves_chart({name: points}, name))
    if charts:
        yield Section("Training", [Charts(charts)])


def _picture_sections(
    sample: Sample, method: Method, seed: int, progress: Progress
) -> Iterator[Section]:
    thumbnails = Thumbnails(sample)
    galleries = Galleries(sample, thumbnails, seed)
    sections = [*galleries.sections()]
    progress("report", 1, 3)
    if len(sample) >= _FEWEST_OF_A_MAP:
        room = min(_MAP_BYTES, max(100_000, _PICTURE_BYTES - galleries.bytes))
        chart = map_chart(sample, thumbnails, room, method, seed)
        hint = (
            "Point at an image, or touch it, to see it. Drag to move the map; turn the wheel with "
            "Ctrl held to zoom; double-click to go back."
        )
        yield Section("Map of the embeddings", [Paragraph(hint, "soft"), Charts([chart])])
    progress("report", 2, 3)
    yield from sections
    if thumbnails.unreadable:
        names = [sample.names[row] for row in sorted(thumbnails.unreadable)]
        table = Table([], [[name] for name in names[:50]])
        count = len(names)
        blocks: list[Block] = [Fold(f"{count:,} pictures shown above cannot be read", table)]
        yield Section("Unreadable pictures", blocks)


def _about(run_dir: Path, config: Mapping[str, Any]) -> Section:
    """Settings, environment, and the images that training passed over."""
    blocks: list[Block] = []
    skipped = read_jsonl(run_dir / UNREADABLE)
    if skipped:
        rows = [[shown(str(one.get("image"))), shown(str(one.get("reason")))] for one in skipped]
        images = "image was" if len(rows) == 1 else "images were"
        table = Table(["Image", "Why"], rows[:50])
        blocks.append(Fold(f"{len(rows):,} {images} left out of training", table))
    settings = [[shown(key), shown(value)] for key, value in _flat(config)]
    blocks.append(Fold("Settings", Table([], settings)))
    try:
        environment = json.loads(read_text(run_dir / ENVIRONMENT))
    except (OSError, ValueError, UserError):
        environment = {}
    if isinstance(environment, dict) and environment:
        facts = [[shown(key), shown(value)] for key, value in _flat(environment)]
        blocks.append(Fold("Environment", Table([], facts)))
    return Section("Settings and environment", blocks)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys, joined by dots, and their values as text."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
