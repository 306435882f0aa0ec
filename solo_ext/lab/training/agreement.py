"""What single processes know, decided at the same step by all."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from solo_ext.core import distributed

_MOST_STEPS = 10_000


class Agreement:
    """Lets processes that know different things act on them at the same step.

    A clock or a signal reaches processes at different steps, and a checkpoint is written by all of
    them together. One process decides at every step. Several exchange what they know about every
    ``seconds``, at a step that their last exchange named; in between nobody acts.

    Args:
        device: of the exchange, one that the process group can send from.
        seconds: between exchanges, roughly.
    """

    def __init__(self, device: torch.device, seconds: float = 5.0) -> None:
        self.device, self.seconds = device, seconds
        self._next: int | None = None
        self._last: tuple[int, float] | None = None

    def any_of(self, wishes: Sequence[int], step: int, *, now: bool = False) -> list[int]:
        """The largest value of every wish over the processes, zeros where it is not time to ask.

        Every process has to call it at the same steps.

        Args:
            wishes: whole numbers, 0 for none.
            step: optimiser steps so far.
            now: exchange at this step in any case.
        """
        if distributed.world_size() == 1:
            return list(wishes)
        if not now and self._next is not None and step < self._next:
            return [0] * len(wishes)
        values = torch.tensor([*wishes, self._ahead(step)], device=self.device)
        *agreed, ahead = distributed.max_over_ranks(values).tolist()
        self._next = step + ahead
        return agreed

    def _ahead(self, step: int) -> int:
        """Steps until the next exchange, by how long those since the last one took."""
        last, self._last = self._last, (step, time.monotonic())
        if last is None or step <= last[0]:
            return 1
        taken, each = step - last[0], (self._last[1] - last[1]) / (step - last[0])
        # Growing step by step: the first ones are slow.
        return max(1, min(int(self.seconds / max(each, 1e-9)), 4 * taken, _MOST_STEPS))
