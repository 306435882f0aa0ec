"""Evaluating a finished run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import Images
from solo_ext.lab.evaluation.protocols import BackboneProtocol, FeatureProtocol, Protocol, Row
from solo_ext.lab.evaluation.settings import read_settings
from solo_ext.lab.evaluation.subject import EvalContext, Progress, open_subject


def evaluate(
    path: Path | str,
    protocol: str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a model with one protocol.

    Args:
        path: as :func:`solo_ext.lab.evaluation.models.open_model` takes it: a run directory, a
            checkpoint, ``timm/<model>`` or ``pixels``.
        protocol: a name in :data:`solo_ext.lab.evaluation.protocols.PROTOCOLS`.
        settings: fields of the protocol, and of :class:`solo_ext.lab.evaluation.settings.EvalRun`.
        progress: called with what is being done and the batches done and in all.

    Returns:
        A record: what was evaluated, on what, with which settings, and ``results``. Of several
        processes those beside the first only help to extract; their ``results`` are empty.

    Raises:
        UserError: wrong settings, or a path that is no run.
    """
    shared, own = read_settings(protocol, dict(settings or {}))
    subject = open_subject(str(path), shared, progress)
    begin = time.monotonic()
    rows = measure(own, subject)
    return {
        "protocol": protocol,
        **about(subject),
        "settings": own.model_dump(),
        "seconds": round(time.monotonic() - begin, 2),
        "results": rows,
    }


def measure(protocol: Protocol, subject: EvalContext) -> list[Row]:
    """Runs one protocol; none but the first of several processes gets rows."""
    if isinstance(protocol, FeatureProtocol):
        features = subject.features
        return [] if subject.ranks.rank else protocol.measure(features)
    assert isinstance(protocol, BackboneProtocol)
    if protocol.needs_every_image:
        _refuse_gaps(subject)
    return [] if subject.ranks.rank else protocol.run(subject.alone())


def _refuse_gaps(subject: EvalContext) -> None:
    """Refuses images without features, which would be shown or trained on as others."""
    for split, names in subject.left_out().items():
        raise ConfigError(
            "data.unreadable",
            "skip",
            f"{len(names)} images of {split} cannot be read, the first {names[0]!r}, and this "
            "protocol needs every image",
            "remove them; protocols on features, such as knn and linear, go without",
        )


def about(subject: EvalContext) -> dict[str, Any]:
    """What is evaluated, and on what."""
    model, cfg = subject.model, subject.cfg
    return {
        "run": model.name,
        "folder": str(model.folder),
        "checkpoint": model.checkpoint,
        "checkpoint_sha256": model.digest,
        "method": cfg.get("method"),
        "backbone": cfg["backbone"],
        "epoch": model.epoch,
        "image_size": cfg["augmentations"][0]["crop_size"],
        "train": _split(subject, "train", subject.train),
        "test": _split(subject, "val", subject.test),
    }


def _split(subject: EvalContext, split: str, images: Images) -> dict[str, Any]:
    unreadable = subject.unreadable.get(split, [])
    data = subject.cfg["data"]
    # Both are parts of the training images where some are held out.
    name = split if data.get("holdout") is None else "train"
    return {
        "path": str(data[f"{name}_path"]),
        "images": len(images) - len(unreadable),
        "unreadable": unreadable,
    }
