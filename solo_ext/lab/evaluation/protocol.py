"""What a protocol of ``solo-ext eval`` is: its settings, how they are read, how it is run."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import create_model

from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import Section
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.models import EvalRun

Row = dict[str, Any]
"""Numbers and short texts by name. ``picture``: file name of a PNG in the context's ``out`` that
the report embeds; ``saved``: file name of weights; ``files``: paths of further files there."""


class Protocol(Section):
    """Settings of a protocol; the two kinds below define how it measures.

    Attributes:
        title: its name in tables.
        by_default: whether the suite runs it without being asked.
        version: raised when the same settings give other numbers than before, so that the suite
            does not reuse old ones from its record.
    """

    title: ClassVar[str]
    by_default: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def depends_on(self, context: EvalContext) -> list[str | None]:
        """Digests of what the rows depend on besides settings, model and images of the context.

        ``None`` in the list: it is unknown whether something is still the same.
        """
        return []

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The few numbers that runs are compared by, such as ``{"acc1": 87.5}``."""
        return {"acc1": float(rows[0]["acc1"])}


class FeatureProtocol(Protocol):
    """A protocol on frozen features, which are extracted once for all of them."""

    @abstractmethod
    def measure(self, features: Features) -> list[Row]:
        """Measures features.

        Raises:
            UserError: these features cannot be measured with the settings.
        """


class BackboneProtocol(Protocol):
    """A protocol that needs the backbone itself, the images, or a place for pictures.

    Attributes:
        needs_every_image: whether to refuse data sets with unreadable images.
    """

    needs_every_image: ClassVar[bool] = True

    @abstractmethod
    def run(self, context: EvalContext) -> list[Row]:
        """Measures a backbone on a data set.

        Raises:
            UserError: the settings or images do not allow it.
        """


def measure(protocol: Protocol, context: EvalContext) -> list[Row]:
    """Runs one protocol; if there are several processes, only the first gets rows."""
    if isinstance(protocol, FeatureProtocol):
        features = context.features
        return [] if context.ranks.rank else protocol.measure(features)
    assert isinstance(protocol, BackboneProtocol)
    if protocol.needs_every_image:
        # Without its features, an image would be shown or trained on as another one.
        for split, names in context.left_out().items():
            raise ConfigError(
                "data.unreadable",
                "skip",
                f"{len(names)} images of {split} cannot be read, the first {names[0]!r}, and this "
                "protocol needs every image",
                "remove them; protocols on features, such as knn and linear, go without",
            )
    return [] if context.ranks.rank else protocol.run(context.alone())


def read_settings(kind: type[Protocol], settings: Mapping[str, Any]) -> tuple[EvalRun, Protocol]:
    """Checks the settings of one protocol together with the shared ones.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    # Use one model with all fields, so that a misspelt key is compared with all valid ones.
    joint = create_model("Evaluation", __base__=(kind, EvalRun))
    values = validated(joint, settings).model_dump()
    own = kind.model_validate({k: values[k] for k in kind.model_fields})
    return EvalRun.model_validate({k: values[k] for k in EvalRun.model_fields}), own


def files_of(rows: Iterable[Row]) -> list[str]:
    """Paths, in the folder of the rows, of pictures, weights and further files.

    >>> files_of([{"acc1": 87.5, "picture": "map.png"}, {"picture": "map.png", "files": ["a.png"]}])
    ['map.png', 'a.png']
    """
    keys = ("picture", "saved")
    named = [[*(row.get(k) for k in keys), *(row.get("files") or ())] for row in rows]
    return list(dict.fromkeys(str(file) for files in named for file in files if file))


def file_digest(file: Path) -> str | None:
    """SHA-256 of a file; ``None`` if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def is_unchanged(file: Path, digest: str | None) -> bool:
    """Whether a file has the digest that it was written with."""
    return digest is not None and file_digest(file) == digest
