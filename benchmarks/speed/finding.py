"""A line of the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.speed.target import Target, Verdict


@dataclass(frozen=True)
class Finding:
    """One number, its target and what was measured.

    Attributes:
        label: what was measured, and of which size.
        target: what the number is to be; ``None``: nobody has said.
        measured: the number, ``None`` where it could not be measured.
        ours: which of our variants.
        peer: what it is compared with.
        again: the same of ours a second time over ours.
        memory: the peer's memory over ours.
        difference: of what both return.
        most_difference: that there may be; beyond it a number is missed, however fast.
        note: why there is no number, or what else there is to say.
    """

    label: str
    target: Target | None
    measured: float | None = None
    ours: str = ""
    peer: str = ""
    again: float | None = None
    memory: float | None = None
    difference: float | None = None
    most_difference: float | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """What the table says."""
        if self.differs:
            return "missed"
        if self.target is None:
            return "no target" if self.measured is not None else "not measured here"
        return self.target.verdict(self.measured)

    @property
    def differs(self) -> bool:
        """Whether ours and the peer's are not the same result; nan is none."""
        if self.difference is None or self.most_difference is None:
            return False
        return not self.difference <= self.most_difference

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Finding:
        """What :meth:`as_json` made."""
        target = held["target"]
        values = {k: v for k, v in held.items() if k not in ("verdict", "target")}
        return cls(target=None if target is None else Target(**target), **values)
