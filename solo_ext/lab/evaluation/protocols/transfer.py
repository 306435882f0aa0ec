"""``eval transfer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen
from pydantic import Field

from solo_ext.config.schema import Free, HuggingFace, Section
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.images import images_fingerprint
from solo_ext.lab.evaluation.classes import has_class_folders
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, Protocol, Row
from solo_ext.lab.evaluation.row_files import files_of
from solo_ext.lab.evaluation.run_settings import EvalData
from solo_ext.lab.evaluation.subject import EvalContext

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-]$", description="a folder's name")
]


class TransferData(Section):
    """Another data set; what is not given is as for the images of the evaluation.

    ``format`` is ``image_folder`` where those lie in no files and these in class folders.
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
    # Of the data sets that it measures on, which the protocols ask for themselves.
    needs_every_image: ClassVar[bool] = False

    datasets: Annotated[dict[Name, TransferData], MinLen(1)]
    protocols: Annotated[list[str], MinLen(1)] = ["linear", "knn"]
    settings: dict[str, Free] = {}

    def depends_on(self, subject: EvalContext) -> list[str | None]:
        """The files of every data set, and the versions of the protocols."""
        others = self._others(subject).values()
        prints = [images_fingerprint(images) for o in others for images in (o.train, o.test)]
        versions = [f"{name} {protocol.version}" for name, protocol in self._measured().items()]
        return [*versions, *prints]

    def run(self, subject: EvalContext) -> list[Row]:
        """A row per data set: ``dataset``, ``classes``, ``train``, ``test``, numbers of protocols.

        The numbers are the headlines of the protocols, such as ``linear_acc1``; the last row has
        their means, where there are several data sets.

        Raises:
            ConfigError: an unknown protocol, a wrong setting of one, or no such folder.
        """
        measured = self._measured()
        # All of them are opened before the first is measured: a wrong path is found at once.
        others = self._others(subject)
        # Taken out one by one: the features of one are not to wait for the others.
        rows = [self._row(name, others.pop(name), measured) for name in self.datasets]
        if len(rows) > 1:
            rows.append(_mean(rows))
        keys = dict.fromkeys(k for row in rows for k in row)
        if not any(row["files"] for row in rows):
            del keys["files"]
        return [{k: row.get(k) for k in keys} for row in rows]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The last row's: the means, or those of the only data set."""
        numbers = {k: v for k, v in rows[-1].items() if k not in _ABOUT}
        return {k: float(v) for k, v in numbers.items() if v is not None}

    def _row(self, name: str, subject: EvalContext, measured: Mapping[str, Protocol]) -> Row:
        from solo_ext.lab.evaluation.evaluate import about, measure

        numbers: Row = {}
        files: list[str] = []
        for key, protocol in measured.items():
            found = measure(protocol, subject)
            numbers |= {f"{key}_{k}": v for k, v in protocol.headline(found).items()}
            files += [str(_place(name) / file) for file in files_of(found)]
        # Known by now: what cannot be read is found by reading it.
        counted = {split: about(subject)[split]["images"] for split in ("train", "test")}
        row = {"dataset": name, "classes": subject.num_classes, **counted, **numbers}
        return {**row, "files": files}

    def _others(self, subject: EvalContext) -> dict[str, EvalContext]:
        return {
            name: replace(
                subject.on(_data(subject, data)),
                # Pictures and weights of one are not to overwrite those of another.
                out=subject.out / _place(name),
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
        from solo_ext.lab.evaluation.protocols import PROTOCOLS
        from solo_ext.lab.evaluation.settings import read_settings

        allowed = [n for n, kind in PROTOCOLS.items() if kind is not Transfer]
        if name not in allowed:
            raise ConfigError("protocols", name, "not possible here", nearest(name, allowed))
        try:
            return read_settings(name, self.settings.get(name, {}))[1]
        except ConfigError as error:
            key = f"settings.{name}.{error.key}"
            raise ConfigError(key, error.value, error.problem, error.remedy) from None


_ABOUT = ("dataset", "classes", "train", "test", "files")


def _place(name: str) -> Path:
    return Path("transfer") / name


def _data(subject: EvalContext, data: TransferData) -> EvalData:
    given = {k: v for k, v in data.model_dump().items() if v is not None}
    held_elsewhere = subject.cfg["data"]["format"] in ("h5", "huggingface")
    if data.format is None and held_elsewhere and has_class_folders(Path(data.train_path)):
        given["format"] = "image_folder"
    if data.huggingface is not None:
        given["huggingface"] = data.huggingface
    return subject.settings.data.model_copy(update=given)


def _mean(rows: list[Row]) -> Row:
    """Of what every data set has: few labels may be too many for one of them."""
    names = [k for k in rows[0] if k not in _ABOUT and all(k in row for row in rows)]
    means: dict[str, Any] = {k: sum(r[k] for r in rows) / len(rows) for k in names}
    return {"dataset": "mean", "classes": "", "train": "", "test": "", **means, "files": []}
