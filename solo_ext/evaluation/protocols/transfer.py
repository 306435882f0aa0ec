"""``eval transfer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import Field

from solo_ext.config.schema import Free, Section
from solo_ext.errors import ConfigError, nearest
from solo_ext.evaluation.protocols.base import BackboneProtocol, FeatureProtocol, Protocol, Row
from solo_ext.evaluation.run_settings import EvalData
from solo_ext.evaluation.subject import Subject

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-]$", description="a folder's name")
]


class TransferData(Section):
    """Class folders of another data set."""

    train_path: str
    val_path: str


class Transfer(BackboneProtocol):
    """Settings of ``eval transfer``: protocols on several data sets, in one table.

    ``settings`` are those of the protocols, by protocol and name.
    """

    title: ClassVar[str] = "Transfer to other data sets"
    by_default: ClassVar[bool] = False

    datasets: Annotated[dict[Name, TransferData], MinLen(1)]
    protocols: Annotated[list[str], MinLen(1)] = ["linear", "knn"]
    settings: dict[str, Free] = {}

    def run(self, subject: Subject) -> list[Row]:
        """A row per data set: ``dataset``, ``classes``, ``train``, ``test``, numbers of protocols.

        The numbers are the headlines of the protocols, such as ``linear_acc1``; the last row has
        their means, where there are several data sets.

        Raises:
            ConfigError: an unknown protocol, a wrong setting of one, or no such folder.
        """
        measured = {name: self._protocol(name) for name in dict.fromkeys(self.protocols)}
        for name in self.settings:
            if name not in measured:
                raise ConfigError(
                    f"settings.{name}", None, "not among the protocols", nearest(name, measured)
                )
        # All of them are opened before the first is measured: a wrong path is found at once.
        others = {
            name: replace(
                subject.on(EvalData(train_path=data.train_path, val_path=data.val_path)),
                # Pictures and weights of one are not to overwrite those of another.
                out=subject.out / "transfer" / name,
            )
            for name, data in self.datasets.items()
        }
        rows = [self._row(name, other, measured) for name, other in others.items()]
        if len(rows) > 1:
            rows.append(_mean(rows))
        return rows

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The last row's: the means, or those of the only data set."""
        return {k: float(v) for k, v in rows[-1].items() if k not in _ABOUT}

    def _row(self, name: str, subject: Subject, measured: Mapping[str, Protocol]) -> Row:
        row: Row = {
            "dataset": name,
            "classes": subject.num_classes,
            "train": len(subject.train),
            "test": len(subject.test),
        }
        for key, protocol in measured.items():
            if isinstance(protocol, FeatureProtocol):
                found = protocol.measure(subject.features)
            else:
                assert isinstance(protocol, BackboneProtocol)
                found = protocol.run(subject)
            row |= {f"{key}_{k}": v for k, v in protocol.headline(found).items()}
        return row

    def _protocol(self, name: str) -> Protocol:
        from solo_ext.evaluation.protocols import PROTOCOLS
        from solo_ext.evaluation.settings import read_settings

        allowed = [n for n, kind in PROTOCOLS.items() if kind is not Transfer]
        if name not in allowed:
            raise ConfigError("protocols", name, "not possible here", nearest(name, allowed))
        try:
            return read_settings(name, self.settings.get(name, {}))[1]
        except ConfigError as error:
            key = f"settings.{name}.{error.key}"
            raise ConfigError(key, error.value, error.problem, error.remedy) from None


_ABOUT = ("dataset", "classes", "train", "test")


def _mean(rows: list[Row]) -> Row:
    names = [k for k in rows[0] if k not in _ABOUT]
    means: dict[str, Any] = {k: sum(r[k] for r in rows) / len(rows) for k in names}
    return {"dataset": "mean", "classes": "", "train": "", "test": "", **means}
