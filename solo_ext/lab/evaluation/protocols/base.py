"""What a protocol of ``solo-ext eval`` is."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from solo_ext.config.schema import Section
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.subject import EvalContext

Row = dict[str, Any]
"""Numbers and short texts by name. ``picture``: file name of a PNG in the subject's ``out`` that
the report embeds; ``page``: file name of a page there that it names; ``saved``: that of weights;
``files``: list of further files there, by their paths in it."""


class Protocol(Section):
    """Settings of a protocol; what it measures is said by the two kinds below.

    Attributes:
        title: what tables call it.
        by_default: whether the suite runs it unless it is told which to run.
        version: raised where the same settings give other numbers than before, so that the suite
            does not take the old ones from its record.
    """

    title: ClassVar[str]
    by_default: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def depends_on(self, subject: EvalContext) -> list[str | None]:
        """Digests of what the rows depend on beside settings, model and images of the subject.

        ``None`` among them: it cannot be told whether that is still the same.
        """
        return []

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The few numbers by which runs are compared, from :class:`Row` dictionaries."""
        return {"acc1": float(rows[0]["acc1"])}


class FeatureProtocol(Protocol):
    """A protocol on frozen features; the only kind that can be measured while training."""

    @abstractmethod
    def measure(self, features: Features) -> list[Row]:
        """Measures features.

        Raises:
            ConfigError: settings that these features cannot fulfil.
        """


class BackboneProtocol(Protocol):
    """A protocol that needs the backbone itself, the images, or a place for pictures.

    Attributes:
        needs_every_image: whether images that cannot be read are a reason to refuse.
    """

    needs_every_image: ClassVar[bool] = True

    @abstractmethod
    def run(self, subject: EvalContext) -> list[Row]:
        """Measures a backbone on a data set.

        Raises:
            UserError: settings or images that do not allow it.
        """
