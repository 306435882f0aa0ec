"""Several protocols in one command, with one record and one report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
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
from solo_ext.data.images import images_fingerprint
from solo_ext.lab.evaluation.context import EvalContext, Progress, open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, headline
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import (
    FeatureProtocol,
    Protocol,
    file_digest,
    files_of,
    is_unchanged,
    measure,
)
from solo_ext.lab.evaluation.store import VERSION
from solo_ext.lab.evaluation.suite_page import render_suite

RECORD, PAGE = "eval_suite.json", "eval_suite.html"
_LOCK = f".{RECORD}.lock"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn")


def evaluate_suite(
    path: Path | str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a model with several protocols.

    ``eval_suite.json`` and ``eval_suite.html`` are written to the model's folder after every
    protocol. If one fails, its error is reported and the others continue. Results of an earlier
    call for the same weights, files and settings are reused, unless a file that it wrote is missing
    or has changed. Several calls at once share the record.

    Args:
        path: as :func:`solo_ext.lab.evaluation.models.open_model` takes it.
        settings: fields of :class:`~solo_ext.lab.evaluation.models.EvalRun`; ``protocols``,
            names; and the settings of each protocol under its name.
        progress: called with the name of a task, its batches done and its batches in all.

    Returns:
        The record: what was evaluated, on what, ``entries``, one for each protocol of this and of
        earlier calls, and ``failed``, those of this call. If there are several processes, all but
        the first only extract features and have no entries.

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


def read_suite_settings(settings: Mapping[str, Any]) -> tuple[EvalRun, dict[str, Protocol | None]]:
    """Checks the settings of a suite.

    Returns:
        The shared ones, and those of the protocols to run in the order of the registry; ``None``
        for a protocol that requires settings and has none.

    Raises:
        ConfigError: unknown protocol or key, or an invalid value.
    """
    names: Any = Literal[tuple(PROTOCOLS)]
    default = [name for name, kind in PROTOCOLS.items() if kind.by_default]
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in PROTOCOLS.items()}
    fields["protocols"] = (Annotated[list[names], MinLen(1)], default)
    joint = create_model("Suite", __base__=EvalRun, **fields)
    checked: Any = validated(joint, settings)
    chosen: dict[str, Protocol | None] = {}
    for name, kind in PROTOCOLS.items():
        if name in checked.protocols:
            needed = any(field.is_required() for field in kind.model_fields.values())
            given = getattr(checked, name)
            chosen[name] = given if given is not None or needed else kind()
    shared = {key: getattr(checked, key) for key in EvalRun.model_fields}
    return EvalRun.model_validate({**shared, "data": shared["data"].model_dump()}), chosen


class _Suite:
    """One call: what is known before a protocol runs, and the growing record."""

    def __init__(self, context: EvalContext) -> None:
        self.context, self.folder = context, context.model.folder
        # Compute these once per call, because they list every file.
        prints = [images_fingerprint(images) for images in (context.train, context.test)]
        self.known = None not in prints
        self.base = _digest(
            {
                "model": context.model.digest,
                "backbone": context.cfg.backbone.model_dump(),
                "images": prints,
                "view": context.cfg.augmentations[0].model_dump(),
                "data": [context.cfg.data.dataset, context.cfg.data.format],
                "dtype": context.settings.features_dtype,
                "features": VERSION,
            }
        )
        _check_folder(self.folder)
        self.entries = self._earlier()
        self.measured: dict[str, dict[str, Any]] = {}
        self.broken_features: str | None = None

    def run(self, chosen: Mapping[str, Protocol | None]) -> dict[str, Any]:
        for place, (name, protocol) in enumerate(chosen.items()):
            if self.context.progress is not None:
                self.context.progress("protocols", place, len(chosen))
            held, key = self.entries.get(name), self._key(protocol)
            if key is None or held is None or held["key"] != key or not self._complete(held):
                self.measured[name] = {"key": key, **self._entry(name, protocol)}
            record = self._kept(chosen)
        return record

    def _key(self, protocol: Protocol | None) -> str | None:
        """Digest of what an entry depends on; ``None`` if that is unknown."""
        content: dict[str, Any] = {"base": self.base, "settings": None}
        if protocol is not None:
            try:
                further = protocol.depends_on(self.context)
            except Exception:
                # Measuring will raise the same error and report it.
                return None
            if None in further:
                return None
            content |= {"settings": protocol.model_dump(), "further": further}
            content["version"] = protocol.version
        return _digest(content)

    def _entry(self, name: str, protocol: Protocol | None) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "protocol": name,
            "title": PROTOCOLS[name].title,
            "settings": None if protocol is None else protocol.model_dump(),
        }
        begin = time.monotonic()
        try:
            if protocol is None:
                required = [k for k, f in PROTOCOLS[name].model_fields.items() if f.is_required()]
                raise UserError(f"it needs {', '.join(f'{name}.{key}' for key in required)}")
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
            files = {file: file_digest(self.context.out / file) for file in files_of(rows)}
            entry |= {"status": "done", "headline": headline(name, rows), "results": rows}
            entry["files"] = files
        return {**entry, "seconds": round(time.monotonic() - begin, 2)}

    def _extract(self) -> None:
        if self.broken_features is not None:
            raise UserError(self.broken_features)
        try:
            _ = self.context.features
        except Exception as error:
            # Remember it, so that the next protocol does not try again.
            self.broken_features = f"no features: {error}"
            raise

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """Entries of an earlier call with the same base, whatever their settings."""
        if not self.known:
            return {}
        try:
            record = json.loads((self.folder / RECORD).read_text())
            if record["base"] != self.base:
                return {}
            found = {e["protocol"]: e for e in record["entries"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {k: e for k, e in found.items() if k in PROTOCOLS}

    def _complete(self, entry: Mapping[str, Any]) -> bool:
        files = entry.get("files") or {}
        return entry["status"] == "done" and all(
            is_unchanged(self.context.out / file, digest) for file, digest in files.items()
        )

    def _kept(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the record, merged with what other calls have written meanwhile."""
        with locked(self.folder / _LOCK):
            self.entries = {**self.entries, **self._earlier(), **self.measured}
            entries = [self.entries[name] for name in PROTOCOLS if name in self.entries]
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


def _check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be written, before hours of work are lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / _LOCK):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError("out", str(folder), reason, "give a folder that can be written") from None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _environment(device: str) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    packages = {name: version(name) for name in _PACKAGES}
    return {"solo_ext": __version__, **packages, "device": where}
