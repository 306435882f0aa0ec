"""The place of a training loader: which epoch, and how many batches of it were served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from solo_ext.data.sampler import EpochSampler


class StatefulLoader:
    """Mixin of loaders that know their place and can be put there again.

    Args:
        order: the order of the samples.
        batch_size: per process; the last, incomplete batch is dropped.
    """

    def start_at(self, order: EpochSampler, batch_size: int) -> None:
        """Takes the place that ``order`` stands at; called by constructors."""
        self.order, self._per_batch = order, batch_size
        self._served_of = order.epoch
        self.served = 0

    def __len__(self) -> int:
        return len(self.order) // self._per_batch

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Passes on the batches that are left of the epoch, and counts them."""
        epoch, first = self.order.epoch, self.order.start // self._per_batch
        self._served_of, self.served = epoch, first
        for batch in batches:
            self.served += 1
            yield batch
        if self.order.epoch == epoch:
            self.order.start = 0

    def state_dict(self) -> dict[str, int]:
        """Place of the next batch: epoch, and batches of it already served."""
        epoch = self.order.epoch
        # The sampler may have been sent to an epoch that nothing was served of yet.
        served = self.served if epoch == self._served_of else 0
        if served >= len(self):
            return {"epoch": epoch + 1, "batches": 0}
        return {"epoch": epoch, "batches": served}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to a place that :meth:`state_dict` gave."""
        self.order.epoch = state["epoch"]
        self.order.start = state["batches"] * self._per_batch
        self._served_of, self.served = state["epoch"], state["batches"]
