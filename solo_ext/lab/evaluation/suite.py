"""Several protocols in one command, with one record and one report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from pydantic import create_model

from solo_ext import __version__
from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import locked, write_text
from solo_ext.lab.evaluation.context import EvalContext, Progress, open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, headline
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Protocol, files_of, measure
from solo_ext.lab.evaluation.store import VERSION
from solo_ext.lab.evaluation.suite_page import render_suite

RECORD, PAGE, PICTURES = "eval_suite.json", "eval_suite.html", "eval_suite"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn")


def evaluate_suite(
    path: Path | str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a model with several protocols.

    ``eval_suite.json`` and ``eval_suite.html`` are written to the model's folder after every
    protocol, pictures and weights to ``eval_suite`` beside them. If a protocol fails, its error is
    reported and the others continue. Results of an earlier call for the same weights, files and
    settings are reused, unless a file that it wrote is missing.

    Args:
        path: as for :func:`~solo_ext.lab.evaluation.evaluate.evaluate`, like ``progress``.
        settings: fields of :class:`~solo_ext.lab.evaluation.models.EvalRun`; ``protocols``,
            names; and the settings of each protocol under its name.
        progress: called as work goes on.

    Returns:
        The record: what was evaluated, on what, ``entries``, one for each protocol of this and of
        earlier calls, and ``failed``, those of this call. Of several processes, all but the first
        only extract features and have no entries.

    Raises:
        UserError: wrong settings, a path that is no run, or a folder that cannot be written.
    """
    shared, chosen = read_suite_settings(settings or {})
    context = open_context(str(path), shared, progress)
    if context.ranks.rank:
        if any(isinstance(protocol, FeatureProtocol) for protocol in chosen.values()):
            # Rank 0 reports errors of the features. If this rank raised them, the launcher would
            # end rank 0 before it has run the other protocols.
            with contextlib.suppress(Exception):
                _ = context.features
        return {**context.about(), "entries": [], "failed": []}
    return _Suite(context).run(chosen)


def read_suite_settings(settings: Mapping[str, Any]) -> tuple[EvalRun, dict[str, Protocol]]:
    """Settings that all protocols share, and those of the ones to run, in the registry's order.

    Raises:
        ConfigError: unknown protocol or key, a missing key, or an invalid value.
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


class _Suite:
    """One call: what is known before a protocol runs, and the growing record."""

    def __init__(self, context: EvalContext) -> None:
        self.folder = context.model.folder
        # A folder of its own: a single protocol writes pictures under the same names.
        self.context = replace(context, out=self.folder / PICTURES)
        self.base = _digest(
            {
                "solo_ext": __version__,
                "model": context.model.digest,
                "backbone": context.cfg.backbone.model_dump(),
                "images": _known(context.fingerprints),
                "view": context.cfg.augmentations[0].model_dump(),
                "data": [context.cfg.data.dataset, context.cfg.data.format],
                "dtype": context.settings.features_dtype,
                "features": VERSION,
            }
        )
        self.measured: dict[str, dict[str, Any]] = {}
        self.no_features: Exception | None = None

    def run(self, chosen: Mapping[str, Protocol]) -> dict[str, Any]:
        try:
            # Write at once, so that no hours of work are lost if the folder cannot be written.
            self.folder.mkdir(parents=True, exist_ok=True)
            record = self._write(chosen)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            remedy = "give a folder that can be written"
            raise ConfigError("out", str(self.folder), reason, remedy) from None
        for place, (name, protocol) in enumerate(chosen.items()):
            if self.context.progress is not None:
                self.context.progress("protocols", place, len(chosen))
            self.measured[name] = self._entry(name, protocol)
            record = self._write(chosen)
        return record

    def _entry(self, name: str, protocol: Protocol) -> dict[str, Any]:
        entry: dict[str, Any] = {"protocol": name, "title": protocol.title}
        entry["settings"] = protocol.model_dump()
        begin = time.monotonic()
        try:
            further = _known(protocol.depends_on(self.context))
            entry["key"] = _digest([self.base, entry["settings"], further])
            held = self._earlier().get(name)
            if held is not None and self._complete(held, entry["key"]):
                return held
            if isinstance(protocol, FeatureProtocol):
                self._extract()
                # Start here, so that the first protocol is not charged for the extraction.
                begin = time.monotonic()
            rows = measure(protocol, self.context)
        except Exception as error:
            # The others continue. A UserError is a sentence; another error needs its type.
            lines = str(error).splitlines() or [""]
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            entry |= {"status": "failed", "error": kind + lines[0]}
        else:
            entry |= {"status": "done", "headline": headline(name, rows), "results": rows}
        return {**entry, "seconds": round(time.monotonic() - begin, 2)}

    def _extract(self) -> None:
        """Extracts the features; if that has failed before, it fails again at once."""
        if self.no_features is None:
            try:
                _ = self.context.features
            except Exception as error:
                self.no_features = error
        if self.no_features is not None:
            raise self.no_features

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """Entries that were written for the same base, whatever their settings."""
        try:
            record = json.loads((self.folder / RECORD).read_text())
            entries = record["entries"] if record["base"] == self.base else []
            return {e["protocol"]: e for e in entries if e["protocol"] in PROTOCOLS}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _complete(self, entry: Mapping[str, Any], key: str) -> bool:
        return (entry.get("key"), entry.get("status")) == (key, "done") and all(
            (self.context.out / file).is_file() for file in files_of(entry["results"])
        )

    def _write(self, chosen: Mapping[str, Protocol]) -> dict[str, Any]:
        """Writes the record, merged with what other calls have written meanwhile."""
        with locked(self.folder / f".{RECORD}.lock"):
            known = {**self._earlier(), **self.measured}
            entries = [known[name] for name in PROTOCOLS if name in known]
            failed = [e["protocol"] for e in entries if e["status"] == "failed"]
            record = {
                "base": self.base,
                **self.context.about(),
                "environment": _environment(self.context.device),
                # Failures of earlier calls do not count for this one.
                "failed": [name for name in failed if name in chosen],
                "entries": entries,
            }
            write_text(self.folder / RECORD, json.dumps(record, indent=1))
            write_text(self.folder / PAGE, render_suite(record, self.context.out))
        return record


def _known(fingerprints: Sequence[str | None]) -> list[str]:
    """The same, where images that cannot be identified equal those of no other call."""
    return [found or uuid.uuid4().hex for found in fingerprints]


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _environment(device: str) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    packages = {name: version(name) for name in _PACKAGES}
    return {"solo_ext": __version__, **packages, "device": where}
