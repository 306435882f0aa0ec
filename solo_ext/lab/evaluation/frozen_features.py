"""What protocols on frozen features are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from solo_ext.core.errors import UserError


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
