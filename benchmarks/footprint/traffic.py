"""What one process gives to collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process gives to each kind of collective.

    Attributes:
        all_reduce: of tensors that are summed.
        all_gather: of its own part, of which all processes get a copy.
        broadcast: of tensors that the first process sends to all.
    """

    all_reduce: int = 0
    all_gather: int = 0
    broadcast: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_reduce + other.all_reduce,
            self.all_gather + other.all_gather,
            self.broadcast + other.broadcast,
        )

    def times(self, count: int) -> Traffic:
        """That of ``count`` such calls."""
        return Traffic(count * self.all_reduce, count * self.all_gather, count * self.broadcast)

    def sent(self, processes: int) -> float:
        """Bytes that leave a process where collectives run in rings, as NCCL's do for large ones.

        A sum goes round twice, ``2 (R - 1) / R`` of its bytes; of an all-gather each process passes
        on R - 1 parts; a broadcast is passed on once.

        Args:
            processes: R.
        """
        others = processes - 1
        return 2 * others / processes * self.all_reduce + others * self.all_gather + self.broadcast
