"""Lists all protocols; runs one on one data set, or several on several data sets (``transfer``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import Field, create_model

from solo_ext.config.check import validated
from solo_ext.config.schema import Free
from solo_ext.core.types import FolderName
from solo_ext.lab.evaluation.clusters import Clusters
from solo_ext.lab.evaluation.context import EvalContext, Progress, open_context
from solo_ext.lab.evaluation.label_free import Views
from solo_ext.lab.evaluation.linear import Linear, LowShot
from solo_ext.lab.evaluation.models import EvalData, EvalRun
from solo_ext.lab.evaluation.names import unknown_protocol
from solo_ext.lab.evaluation.pictures import FeatureMap, Neighbors
from solo_ext.lab.evaluation.protocol import Protocol, Row, files_of, measure, protocols_of
from solo_ext.lab.evaluation.scores import KNN, Clustering, Geometry, Retrieval
from solo_ext.lab.evaluation.supervised import Finetune, LinearAugmented

_ON_ONE_DATA_SET: dict[str, type[Protocol]] = {
    "knn": KNN,
    "linear": Linear,
    "lowshot": LowShot,
    "clustering": Clustering,
    "retrieval": Retrieval,
    "geometry": Geometry,
    "linear_augmented": LinearAugmented,
    "finetune": Finetune,
    "map": FeatureMap,
    "neighbors": Neighbors,
    "views": Views,
    "clusters": Clusters,
}
"""Protocols that can measure each data set, in the order of the report."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-]$")]
_ABOUT = ("dataset", "classes", "train", "test", "files")


class TransferData(EvalData):
    """Another data set; by default its settings are those of the evaluation's images.

    >>> TransferData(train_path="flowers/train", val_path="flowers/val").format is None
    True
    """

    train_path: FolderName
    val_path: FolderName


class Transfer(Protocol):
    """Settings of ``eval transfer``: protocols on several data sets, in one table.

    ``settings`` maps the name of a protocol to its settings.

    >>> flowers = {"train_path": "flowers/train", "val_path": "flowers/val"}
    >>> Transfer(datasets={"flowers": flowers}, protocols=["knn"]).settings
    {}
    """

    title: ClassVar[str] = "Transfer to other data sets"
    by_default: ClassVar[bool] = False
    # The run's own images are not used, and each protocol checks the images of its data set.
    needs_labels: ClassVar[bool] = False

    datasets: Annotated[dict[Name, TransferData], MinLen(1)]
    protocols: Annotated[list[str], MinLen(1)] = ["linear", "knn"]
    settings: dict[str, Free] = {}

    def depends_on(self, context: EvalContext) -> list[str | None]:
        return [found for o in self._contexts(context).values() for found in o.fingerprints]

    def run(self, context: EvalContext) -> list[Row]:
        """One row per data set with the protocols' headlines; with several, a last row of means.

        Raises:
            ConfigError: an unknown protocol, a wrong setting of one, or no such folder.
        """
        measured = protocols_of(_ON_ONE_DATA_SET, self.protocols, self.settings, "settings")
        # Open all data sets before measuring the first, so that a wrong path is found at once.
        contexts = self._contexts(context)
        # pop() frees the features of a data set before those of the next are extracted.
        rows = [_row(name, contexts.pop(name), measured) for name in self.datasets]
        if len(rows) > 1:
            # `lowshot` leaves out amounts that exceed a data set: average what all rows have.
            names = [k for k in rows[0] if k not in _ABOUT and all(k in row for row in rows)]
            means = {k: sum(row[k] for row in rows) / len(rows) for k in names}
            rows.append({**dict.fromkeys(_ABOUT, ""), "dataset": "mean", **means, "files": []})
        keys = dict.fromkeys(k for row in rows for k in row)
        if not any(row["files"] for row in rows):
            del keys["files"]
        return [{k: row.get(k) for k in keys} for row in rows]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Numbers of the last row: the means, or those of the only data set."""
        # A value is None if this data set cannot be measured like the others.
        given = {k: v for k, v in rows[-1].items() if k not in _ABOUT and v is not None}
        return {k: float(v) for k, v in given.items()}

    def _contexts(self, context: EvalContext) -> dict[str, EvalContext]:
        """Contexts by data set; each has its own folder for pictures and weights."""
        found = {}
        for name, given in self.datasets.items():
            own = {key: value for key, value in given if value is not None}
            data = context.settings.data.model_copy(update=own)
            found[name] = context.on(data, context.out / "transfer" / name)
        return found


def _row(name: str, context: EvalContext, measured: Mapping[str, Protocol]) -> Row:
    numbers: Row = {}
    files: list[str] = []
    for key, protocol in measured.items():
        found = measure(protocol, context)
        numbers |= {f"{key}_{k}": v for k, v in protocol.headline(found).items()}
        files += [f"transfer/{name}/{file}" for file in files_of(found)]
    # Count last: unreadable images are only found during the extraction.
    counted = {split: context.about()[split]["images"] for split in ("train", "test")}
    classes = len(context.class_names)
    return {"dataset": name, "classes": classes, **counted, **numbers, "files": files}


PROTOCOLS: dict[str, type[Protocol]] = {**_ON_ONE_DATA_SET, "transfer": Transfer}
"""Protocols by their name on the command line, in the order of the report."""


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
        raise unknown_protocol(protocol)
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
    given = validated(joint, settings)
    own = kind(**{k: getattr(given, k) for k in kind.model_fields})
    return EvalRun(**{k: getattr(given, k) for k in EvalRun.model_fields}), own
