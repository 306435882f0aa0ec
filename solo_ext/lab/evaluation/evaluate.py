"""Evaluates a finished run with one protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import create_model

from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.lab.evaluation.context import Progress, open_context
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import Protocol, measure
from solo_ext.lab.evaluation.transfer import ON_ONE_DATA_SET, Transfer

PROTOCOLS: dict[str, type[Protocol]] = {**ON_ONE_DATA_SET, "transfer": Transfer}
"""Protocols by their name on the command line, in the order of the report."""
SUITE = "suite"
"""Name for several protocols with one report, used instead of a protocol's."""


def evaluate(
    path: Path | str,
    protocol: str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measures a model with one protocol.

    Args:
        path: a run directory, a checkpoint, ``timm/<model>`` or ``pixels``.
        protocol: a name in :data:`PROTOCOLS`.
        settings: fields of the protocol, and of :class:`~solo_ext.lab.evaluation.models.EvalRun`.
        progress: called with the name of a task, its batches done and its batches in all.

    Returns:
        A record: what was evaluated, on what, with which settings, and ``results``. If there are
        several processes, all but the first only extract features and have empty ``results``.

    Raises:
        UserError: wrong settings, or a path that is no run.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("train/blue", "train/red", "val/blue", "val/red"):
    ...     (root / name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 8), Path(name).name).save(root / name / "1.png")
    >>> data = {"train_path": str(root / "train"), "val_path": str(root / "val")}
    >>> shared = {"data": data, "num_workers": 0, "out": str(root)}
    >>> record = evaluate("pixels", "knn", {"k": [1], "temperature": [0.1], **shared})
    >>> record["test"]["images"], record["results"]
    (2, [{'k': 1, 'temperature': 0.1, 'acc1': 100.0, 'acc5': 100.0}])
    """
    if protocol not in PROTOCOLS:
        names = nearest(protocol, (*PROTOCOLS, SUITE), show=40)
        raise ConfigError("protocol", protocol, "unknown protocol", names)
    shared, own = read_settings(PROTOCOLS[protocol], settings or {})
    context = open_context(str(path), shared, progress)
    begin = time.monotonic()
    rows = measure(own, context)
    return {
        "protocol": protocol,
        **context.about(),
        "settings": own.model_dump(),
        "seconds": round(time.monotonic() - begin, 2),
        "results": rows,
    }


def read_settings(kind: type[Protocol], settings: Mapping[str, Any]) -> tuple[EvalRun, Protocol]:
    """Checks the settings of one protocol together with the shared ones.

    >>> shared, own = read_settings(PROTOCOLS["knn"], {"k": [5], "batch_size": 32})
    >>> own, shared.batch_size
    (KNN(k=[5], temperature=[0.07, 0.1]), 32)
    """
    # One model of all fields, so that a misspelt key is compared with all valid ones.
    joint = create_model("Evaluation", __base__=(kind, EvalRun))
    given = validated(joint, settings).model_dump()
    own = kind(**{k: given[k] for k in kind.model_fields})
    return EvalRun(**{k: given[k] for k in EvalRun.model_fields}), own
