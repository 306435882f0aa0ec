"""``eval transfer``: runs the other protocols on several data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen
from pydantic import Field
from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.config.schema import Free, HuggingFace
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.core.types import Section
from solo_ext.data.images import images_fingerprint
from solo_ext.lab.evaluation.clustering import Clusters
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.finetune import Finetune
from solo_ext.lab.evaluation.geometry import FeatureSpace
from solo_ext.lab.evaluation.knn import KNN, Retrieval
from solo_ext.lab.evaluation.linear import Linear, LinearSGD, LowShot
from solo_ext.lab.evaluation.linear_augmented import LinearAugmented
from solo_ext.lab.evaluation.map import FeatureMap
from solo_ext.lab.evaluation.models import EvalData
from solo_ext.lab.evaluation.neighbors import Neighbors
from solo_ext.lab.evaluation.protocol import (
    BackboneProtocol,
    Protocol,
    Row,
    files_of,
    measure,
    read_settings,
)

ON_ONE_DATA_SET: dict[str, type[Protocol]] = {
    "knn": KNN,
    "linear": Linear,
    "linear_sgd": LinearSGD,
    "lowshot": LowShot,
    "clustering": Clusters,
    "retrieval": Retrieval,
    "geometry": FeatureSpace,
    "linear_augmented": LinearAugmented,
    "finetune": Finetune,
    "map": FeatureMap,
    "neighbors": Neighbors,
}
"""Protocols that can measure each data set, in the order of the report."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-]$")]


class TransferData(Section):
    """Another data set; by default its settings are those of the evaluation's images.

    ``format`` is ``image_folder`` if those images are not files but this path has class folders.
    """

    train_path: str
    val_path: str
    format: Literal["image_folder", "h5", "huggingface", "dali"] | None = None
    huggingface: HuggingFace | None = None


class Transfer(BackboneProtocol):
    """Settings of ``eval transfer``: protocols on several data sets, in one table.

    ``settings`` are those of the protocols, by protocol and name.
    """

    title: ClassVar[str] = "Transfer to other data sets"
    by_default: ClassVar[bool] = False
    # The run's own images are not used; protocols check the data sets themselves.
    needs_every_image: ClassVar[bool] = False

    datasets: Annotated[dict[Name, TransferData], MinLen(1)]
    protocols: Annotated[list[str], MinLen(1)] = ["linear", "knn"]
    settings: dict[str, Free] = {}

    def depends_on(self, context: EvalContext) -> list[str | None]:
        """The files of every data set, and the versions of the protocols."""
        others = self._others(context).values()
        prints = [images_fingerprint(images) for o in others for images in (o.train, o.test)]
        versions = [f"{name} {protocol.version}" for name, protocol in self._measured().items()]
        return [*versions, *prints]

    def run(self, context: EvalContext) -> list[Row]:
        """A row per data set: ``dataset``, ``classes``, ``train``, ``test``, numbers of protocols.

        The numbers are the headlines of the protocols, such as ``linear_acc1``; if there are
        several data sets, the last row has their means.

        Raises:
            ConfigError: an unknown protocol, a wrong setting of one, or no such folder.
        """
        measured = self._measured()
        # Open all data sets before measuring the first, so that a wrong path is found at once.
        others = self._others(context)
        # pop() frees the features of a data set before those of the next are extracted.
        rows = [self._row(name, others.pop(name), measured) for name in self.datasets]
        if len(rows) > 1:
            rows.append(_mean(rows))
        keys = dict.fromkeys(k for row in rows for k in row)
        if not any(row["files"] for row in rows):
            del keys["files"]
        return [{k: row.get(k) for k in keys} for row in rows]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Numbers of the last row: the means, or those of the only data set."""
        numbers = {k: v for k, v in rows[-1].items() if k not in _ABOUT}
        return {k: float(v) for k, v in numbers.items() if v is not None}

    def _row(self, name: str, context: EvalContext, measured: Mapping[str, Protocol]) -> Row:
        numbers: Row = {}
        files: list[str] = []
        for key, protocol in measured.items():
            found = measure(protocol, context)
            numbers |= {f"{key}_{k}": v for k, v in protocol.headline(found).items()}
            files += [str(_place(name) / file) for file in files_of(found)]
        # Count last: unreadable images are only found during the extraction.
        counted = {split: context.about()[split]["images"] for split in ("train", "test")}
        row = {"dataset": name, "classes": context.num_classes, **counted, **numbers}
        return {**row, "files": files}

    def _others(self, context: EvalContext) -> dict[str, EvalContext]:
        return {
            name: replace(
                context.on(_data(context, data)),
                # One folder per data set, so that pictures and weights are not overwritten.
                out=context.out / _place(name),
            )
            for name, data in self.datasets.items()
        }

    def _measured(self) -> dict[str, Protocol]:
        measured = {name: self._protocol(name) for name in dict.fromkeys(self.protocols)}
        for name in self.settings:
            if name not in measured:
                raise ConfigError(
                    f"settings.{name}", None, "not among the protocols", nearest(name, measured)
                )
        return measured

    def _protocol(self, name: str) -> Protocol:
        kind = ON_ONE_DATA_SET.get(name)
        if kind is None:
            raise ConfigError(
                "protocols", name, "not possible here", nearest(name, ON_ONE_DATA_SET)
            )
        try:
            return read_settings(kind, self.settings.get(name, {}))[1]
        except ConfigError as error:
            key = f"settings.{name}.{error.key}"
            raise ConfigError(key, error.value, error.problem, error.remedy) from None


_ABOUT = ("dataset", "classes", "train", "test", "files")


def _place(name: str) -> Path:
    return Path("transfer") / name


def _data(context: EvalContext, data: TransferData) -> EvalData:
    given = {k: v for k, v in data.model_dump().items() if v is not None}
    held_elsewhere = context.cfg.data.format in ("h5", "huggingface")
    if data.format is None and held_elsewhere and _has_class_folders(Path(data.train_path)):
        given["format"] = "image_folder"
    if data.huggingface is not None:
        given["huggingface"] = data.huggingface
    return context.settings.data.model_copy(update=given)


def _mean(rows: list[Row]) -> Row:
    """Means of the numbers that every data set has; few-label amounts may exceed one of them."""
    names = [k for k in rows[0] if k not in _ABOUT and all(k in row for row in rows)]
    means: dict[str, Any] = {k: sum(r[k] for r in rows) / len(rows) for k in names}
    return {"dataset": "mean", "classes": "", "train": "", "test": "", **means, "files": []}


def _has_class_folders(root: Path) -> bool:
    """Whether a folder contains folders with images."""
    root = root.expanduser()
    if not root.is_dir():
        return False
    folders = (p for p in root.iterdir() if p.is_dir())
    return any(file.suffix.lower() in IMG_EXTENSIONS for f in folders for file in f.iterdir())
