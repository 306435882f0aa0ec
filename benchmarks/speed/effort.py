"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Effort:
    """How much is measured, and where.

    Attributes:
        rounds: that count.
        warm: rounds before them.
        shrink: sizes are divided by it; verdicts are given at 1 alone.
        compiled: whether peers are compiled, which takes seconds for each.
        device: of the tensors.
    """

    rounds: int = 9
    warm: int = 10
    shrink: int = 1
    compiled: bool = True
    device: Literal["cpu", "cuda"] = "cpu"

    def size(self, full: int, least: int = 16) -> int:
        """The size in place of ``full``."""
        return max(full // self.shrink, min(full, least))


QUICK = Effort(rounds=3, warm=1, shrink=16, compiled=False)
