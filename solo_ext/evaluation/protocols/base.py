"""What a protocol of ``solo-ext eval`` is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from solo_ext.config.schema import Section
from solo_ext.errors import UserError

if TYPE_CHECKING:
    from solo_ext.evaluation.subject import Subject

Row = dict[str, Any]
"""Numbers and short texts by name. ``picture``: file name of a PNG in the subject's ``out`` that
the report embeds; ``page``: file name of a page there that it names; ``saved``: that of weights;
``files``: list of further files there, by their paths in it."""


@dataclass(frozen=True)
class Features:
    """Frozen features of both splits; rows with target -1 carry no label.

    Attributes:
        train: (n, D), on the CPU, finite; float32, or half precision where they are stored so.
        train_targets: (n,) int64.
        test: (m, D).
        test_targets: (m,).
        num_classes: C; ``None``: one more than the largest target.
        class_names: by number; none where they are not known.
        device: where to compute.
    """

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor
    num_classes: int | None = None
    device: str = "cpu"
    class_names: Sequence[str] = ()

    def name_of(self, label: int) -> str:
        """What messages call a class."""
        return repr(self.class_names[label]) if label < len(self.class_names) else str(label)

    @property
    def classes(self) -> int:
        """C, of the data set or as the targets show it."""
        targets = (self.train_targets, self.test_targets)
        return self.num_classes or 1 + max(int(t.max()) for t in targets)

    def split(self, name: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        """Labelled features of one split and their targets.

        Raises:
            UserError: there are none.
        """
        features = self.train if name == "train" else self.test
        targets = self.train_targets if name == "train" else self.test_targets
        labelled = targets >= 0
        if not labelled.any():
            path = "train_path" if name == "train" else "val_path"
            raise UserError(
                f"none of {len(targets)} images of the {name} split has a label; give images with "
                f"labels, such as class folders, with data.{path}=..."
            )
        return (features, targets) if labelled.all() else (features[labelled], targets[labelled])

    def check_labelled(self) -> None:
        """Refuses features without a label in one of the splits.

        Raises:
            UserError: as :meth:`split`.
        """
        for name in ("train", "test"):
            self.split(name)


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

    def depends_on(self, subject: Subject) -> list[str | None]:
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
    def run(self, subject: Subject) -> list[Row]:
        """Measures a backbone on a data set.

        Raises:
            UserError: settings or images that do not allow it.
        """
