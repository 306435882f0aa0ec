"""Runs several protocols in one command, with one record and one self-contained HTML page."""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from pydantic import create_model
from typing_extensions import TypedDict

from solo_ext import __version__
from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError, UserError, first_line
from solo_ext.core.files import locked, read_json, write_text
from solo_ext.lab.evaluation.context import EvalContext, Progress, open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS
from solo_ext.lab.evaluation.features import VERSION
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Protocol, Row, files_of, measure
from solo_ext.lab.pages import (
    Block,
    Card,
    Cards,
    Figure,
    Figures,
    Paragraph,
    Section,
    Table,
    render_page,
)

RECORD, PAGE, PICTURES = "eval_suite.json", "eval_suite.html", "eval_suite"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn")
_NAMES = {
    **{"acc1": "top-1", "acc5": "top-5", "map": "mAP", "nmi": "NMI", "ari": "ARI", "knn": "kNN"},
    **{"infonce": "InfoNCE", "protonce": "ProtoNCE", "alphareq": "alpha-ReQ"},
    **{"rankme": "RankMe", "lidar": "LiDAR", "ci95": "± (95 %)"},
}
"""Names of numbers in headings."""
_FILES = ("picture", "files")


def evaluate_suite(
    path: Path | str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measures a model with several protocols.

    ``eval_suite.json`` and ``eval_suite.html`` are written to the model's folder after every
    protocol, pictures and weights to ``eval_suite`` beside them. A protocol that the images or the
    backbone do not allow, such as one that needs labels, is left out. If a protocol fails, its
    error is reported and the others continue. Results of an earlier call for the same weights,
    images and settings are reused, unless a file of theirs is missing.

    Args:
        path: as for :func:`~solo_ext.lab.evaluation.evaluate.evaluate`.
        settings: fields of :class:`~solo_ext.lab.evaluation.models.EvalRun`; ``protocols``, a list
            of names; and the settings of each protocol under its name.
        progress: as for :func:`~solo_ext.lab.evaluation.evaluate.evaluate`.

    Returns:
        The record: what was evaluated, on what, ``entries``, one for each protocol of this and of
        earlier calls, ``left_out``, the protocols of this call that are not possible, with the
        reason, and ``failed``, those that failed. If there are several processes, all but the first
        only extract features and have no entries.

    Raises:
        UserError: wrong settings, a path that is no run, a folder that cannot be written, or none
            of the protocols is possible.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
    ...     (root / name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 8), "red").save(root / name / "1.png")
    >>> data = {"train_path": str(root / "train"), "val_path": str(root / "val")}
    >>> settings = {"data": data, "crop_size": 8, "num_workers": 0, "out": str(root)}
    >>> record = evaluate_suite("pixels", {"protocols": ["knn"], "knn": {"k": [1]}, **settings})
    >>> record["entries"][0]["title"], (root / "eval_suite.html").exists()
    ('Weighted cosine kNN', True)
    """
    shared, chosen = read_suite_settings(settings or {})
    context = open_context(str(path), shared, progress)
    reasons = {name: protocol.unfit(context) for name, protocol in chosen.items()}
    chosen = {name: protocol for name, protocol in chosen.items() if reasons[name] is None}
    left_out = [
        {
            "protocol": name,
            "title": PROTOCOLS[name].title,
            "reason": str(ConfigError(reason.key, reason.value, reason.problem)),
        }
        for name, reason in reasons.items()
        if reason is not None
    ]
    if not chosen:
        raise next(reason for reason in reasons.values() if reason is not None)
    if context.ranks.rank:
        if any(isinstance(protocol, FeatureProtocol) for protocol in chosen.values()):
            # Rank 0 reports errors of the features. If this rank raised them, the launcher would
            # end rank 0 before it has run the other protocols.
            with contextlib.suppress(Exception):
                _ = context.features.train, context.features.test
        return {**context.about(), "entries": [], "left_out": left_out, "failed": []}
    return _Suite(context, left_out).run(chosen)


def read_suite_settings(settings: Mapping[str, Any]) -> tuple[EvalRun, dict[str, Protocol]]:
    """The settings that all protocols share, and the protocols to run in the order of PROTOCOLS.

    Raises:
        ConfigError: unknown protocol or key, a missing key, or an invalid value.

    >>> read_suite_settings({"protocols": ["geometry", "knn"], "knn": {"k": [5]}})[1]
    {'knn': KNN(k=[5], temperature=[0.07, 0.1]), 'geometry': Geometry(split='test', ...)}
    """
    names: Any = Literal[tuple(PROTOCOLS)]
    default = [name for name, kind in PROTOCOLS.items() if kind.by_default]
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in PROTOCOLS.items()}
    fields["protocols"] = (Annotated[list[names], MinLen(1)], default)
    checked: Any = validated(create_model("Suite", __base__=EvalRun, **fields), settings)
    chosen = {
        name: getattr(checked, name) or validated(kind, {}, prefix=name)
        for name, kind in PROTOCOLS.items()
        if name in checked.protocols
    }
    return EvalRun(**{key: getattr(checked, key) for key in EvalRun.model_fields}), chosen


class _Entry(TypedDict):
    """Result of one protocol, or why it failed."""

    protocol: str
    title: str
    settings: dict[str, Any]
    key: str
    status: Literal["done", "failed"]
    error: str
    headline: dict[str, float]
    results: list[Row]
    seconds: float


class _Record(TypedDict):
    base: str
    entries: list[_Entry]


class _Suite:
    """One call of the suite: its context, and the record that grows with every protocol."""

    def __init__(self, context: EvalContext, left_out: Sequence[Mapping[str, str]]) -> None:
        self.folder, self.left_out = context.model.folder, left_out
        # Use a separate folder: a protocol run by itself writes pictures of the same names.
        self.context = replace(context, out=self.folder / PICTURES)
        data, images = context.cfg.data, _known(self.context.fingerprints)
        self.base = context.digest(images, data.dataset, data.format, VERSION)
        self.measured: dict[str, _Entry] = {}

    def run(self, chosen: Mapping[str, Protocol]) -> dict[str, Any]:
        try:
            # Write now, so that a folder that cannot be written is noticed before hours of work.
            self.folder.mkdir(parents=True, exist_ok=True)
            record = self._write(chosen)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            remedy = "give a folder that can be written"
            raise ConfigError("out", str(self.folder), reason, remedy) from None
        for place, (name, protocol) in enumerate(chosen.items()):
            self.context.progress("protocols", place, len(chosen))
            self.measured[name] = self._entry(name, protocol)
            record = self._write(chosen)
        return record

    def _entry(self, name: str, protocol: Protocol) -> _Entry:
        entry: _Entry = {
            "protocol": name,
            "title": protocol.title,
            "settings": protocol.model_dump(),
            "key": "",
            "status": "failed",
            "error": "",
            "headline": {},
            "results": [],
            "seconds": 0.0,
        }
        begin = time.monotonic()
        try:
            further = _known(protocol.depends_on(self.context))
            entry["key"] = self.context.digest(self.base, entry["settings"], further)
            held = self._earlier().get(name)
            if held is not None and self._complete(held, entry["key"]):
                return held
            if isinstance(protocol, FeatureProtocol):
                if self.no_features is not None:
                    raise self.no_features
                # Restart the clock, so that the first protocol is not charged for the extraction.
                begin = time.monotonic()
            rows = measure(protocol, self.context)
        except Exception as error:
            # Other protocols continue. A UserError explains itself; other errors need their type.
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            entry["error"] = kind + first_line(error)
        else:
            entry |= {"status": "done", "headline": protocol.headline(rows), "results": rows}
        entry["seconds"] = round(time.monotonic() - begin, 2)
        return entry

    @cached_property
    def no_features(self) -> Exception | None:
        """Extracts the features, once for all protocols; returns the error if that fails."""
        try:
            features = self.context.features
            _ = features.train, features.test
        except Exception as error:
            return error
        return None

    def _earlier(self) -> dict[str, _Entry]:
        """Entries of earlier calls with the same ``base``, whatever their settings."""
        try:
            record = read_json(self.folder / RECORD, _Record)
        except (OSError, UserError):
            return {}
        entries = record["entries"] if record["base"] == self.base else []
        return {e["protocol"]: e for e in entries if e["protocol"] in PROTOCOLS}

    def _complete(self, entry: _Entry, key: str) -> bool:
        return (entry["key"], entry["status"]) == (key, "done") and all(
            (self.context.out / file).is_file() for file in files_of(entry["results"])
        )

    def _write(self, chosen: Mapping[str, Protocol]) -> dict[str, Any]:
        """Writes the record, merged with what other calls have written meanwhile."""
        device = self.context.device
        where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
        packages = {name: version(name) for name in _PACKAGES}
        with locked(self.folder / f".{RECORD}.lock"):
            known = {**self._earlier(), **self.measured}
            entries = [known[name] for name in PROTOCOLS if name in known]
            failed = [e["protocol"] for e in entries if e["status"] == "failed"]
            record = {
                "base": self.base,
                **self.context.about(),
                "environment": {"solo_ext": __version__, **packages, "device": where},
                # Failures of earlier calls stay in the entries, but not in this list.
                "failed": [name for name in failed if name in chosen],
                "left_out": self.left_out,
                "entries": entries,
            }
            write_text(self.folder / RECORD, json.dumps(record, indent=1))
            write_text(self.folder / PAGE, _render_suite(record, self.context.out))
        return record


def _known(fingerprints: Sequence[str | None]) -> list[str]:
    """Replaces each unknown fingerprint by a random one, which equals that of no other call."""
    return [found or uuid.uuid4().hex for found in fingerprints]


def _render_suite(record: Mapping[str, Any], folder: Path) -> str:
    """The page of a suite's record, complete or not; it embeds pictures from ``folder``."""
    entries, backbone = record["entries"], record["backbone"]
    kwargs = ", ".join(f"{k} {v}" for k, v in (backbone.get("kwargs") or {}).items())
    trained = "" if record["epoch"] is None else f", {record['epoch']} epochs"
    about = {
        "model": record["run"],
        "weights": f"{record['checkpoint']}{trained} (digest {record['checkpoint_sha256']})",
        "backbone": f"{backbone['name']}{f' ({kwargs})' if kwargs else ''}",
        "train": f"{record['train']['images']:,} images of {record['train']['path']}",
        "test": f"{record['test']['images']:,} images of {record['test']['path']}",
        "view": f"{record['image_size']} x {record['image_size']} pixels",
    }
    notes = [Paragraph(f"{note[0].upper()}{note[1:]}.") for note in record["notes"]]
    if record["left_out"]:
        notes.append(Paragraph(left_out_line(record["left_out"])))
    remark = (
        "Accuracies and agreement in percent. The backbone is frozen unless the protocol says "
        "otherwise; the test split chooses nothing."
    )
    summary = Table(
        ["Protocol", "Result", "Seconds"],
        [[e["title"], _result(e), f"{e['seconds']:.1f}"] for e in entries],
        numeric=frozenset({2}),
    )
    return render_page(
        f"Evaluation of {record['method'] or record['run']}",
        [
            Section("", [_facts(about), *notes]),
            Section("Summary", [headline_cards(entries), Paragraph(remark, "soft"), summary]),
            *(Section(e["title"], [*_blocks(e, folder)]) for e in entries),
            Section("What ran where", [_facts(record["environment"])]),
        ],
    )


def left_out_line(left_out: Sequence[Mapping[str, str]]) -> str:
    """One sentence about what a suite left out, from its record.

    >>> left_out_line([{"protocol": "knn", "title": "kNN", "reason": "data.no_labels=true: ..."}])
    'Left out: knn (data.no_labels=true: ...)'
    """
    by_reason: dict[str, list[str]] = {}
    for one in left_out:
        by_reason.setdefault(one["reason"], []).append(one["protocol"])
    return "Left out: " + "; ".join(f"{', '.join(p)} ({r})" for r, p in by_reason.items())


def headline_cards(entries: Sequence[Mapping[str, Any]]) -> Cards:
    """The first number of each protocol in the entries of a suite's record.

    >>> headline_cards([{"title": "kNN", "headline": {"acc1": 87.5, "acc1_200": 85.0}}]).items
    [Card(label='kNN', value='87.50', note='top-1')]
    """
    firsts = [(e, *next(iter(e["headline"].items()))) for e in entries if e["headline"]]
    return Cards([Card(e["title"], _cell(float(value)), words(key)) for e, key, value in firsts])


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table([], [[str(k), str(v)] for k, v in facts.items()])


def _result(entry: Mapping[str, Any]) -> str:
    if entry["status"] != "done":
        return f"failed: {entry['error']}"
    numbers = entry["headline"].items()
    return ", ".join(f"{words(k)} {_cell(float(v))}" for k, v in numbers)


def _blocks(entry: Mapping[str, Any], folder: Path) -> Iterator[Block]:
    if entry["status"] != "done":
        yield Paragraph(entry["error"], "wrong")
        return
    rows: Sequence[Mapping[str, Any]] = entry["results"]
    keys = [k for k in rows[0] if k not in _FILES] if rows else []
    if keys:
        numeric = {i for i, k in enumerate(keys) if any(_is_number(row.get(k)) for row in rows)}
        cells = [[_cell(row.get(k)) for k in keys] for row in rows]
        yield Table([words(k) for k in keys], cells, numeric=frozenset(numeric))
    figures = [_figure(row, folder) for row in rows if row.get("picture")]
    if figures:
        yield Figures(figures)
    settings = ", ".join(f"{k} {v}" for k, v in entry["settings"].items())
    yield Paragraph(f"eval {entry['protocol']}: {settings}", "soft")


def _figure(row: Mapping[str, Any], folder: Path) -> Figure:
    """The picture of a row, if it is a PNG file in ``folder`` itself and no link, and a caption."""
    name = str(row["picture"])
    file, said = folder / name, [f"{words(k)} {_cell(row[k])}" for k in row if k not in _FILES]
    own = Path(name).name == name and file.suffix.lower() == ".png" and not file.is_symlink()
    png = file.read_bytes() if own and file.is_file() else b""
    return Figure(", ".join(said) + ("" if png else f" (no picture {name})"), png=png)


def words(key: str) -> str:
    """The name of a number, for readers.

    >>> words("recall_5"), words("knn_acc1")
    ('recall 5', 'kNN top-1')
    """
    for name in ("info_nce", "proto_nce", "alpha_req"):
        key = key.replace(name, name.replace("_", ""))
    return " ".join(_NAMES.get(word, word) for word in key.split("_"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # Two decimals are too few for numbers below 1.
        return f"{value:.2f}" if abs(value) >= 1 or not value else f"{value:.4g}"
    return str(value)
