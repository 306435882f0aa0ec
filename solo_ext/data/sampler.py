"""The order of training samples, a function of seed and epoch, and a loader's position in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from solo_ext.core import distributed
from solo_ext.core.draws import mix


class SampleKey(NamedTuple):
    """What the sampler requests: a sample, and the epoch that augmentation draws for."""

    epoch: int
    sample: int


class EpochSampler(Sampler[SampleKey]):
    """Permutation of the data set drawn from (seed, epoch), divided among the ranks.

    Every rank yields the same number of samples: a remainder that does not divide evenly is left
    out of that epoch.

    Args:
        size: number of samples of the data set.
        seed: seed of the run.
        num_replicas: number of processes; those of ``torch.distributed`` by default.
        rank: this process; that of ``torch.distributed`` by default.

    >>> sampler = EpochSampler(5, seed=0, num_replicas=2, rank=0)
    >>> [key.sample for key in sampler]
    [2, 1]
    """

    def __init__(
        self, size: int, seed: int, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.size, self.seed = size, seed
        self._replicas, self._rank = num_replicas, rank
        self.epoch = 0
        self.start = 0

    def _share(self) -> tuple[int, int]:
        # Ask at every pass, because loaders are built before the process group.
        replicas = self._replicas or distributed.world_size()
        return replicas, distributed.rank() if self._rank is None else self._rank

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, starting at its first sample unless it is already the current one."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.size // self._share()[0]

    def __iter__(self) -> Iterator[SampleKey]:
        replicas, rank = self._share()
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.size, generator=generator)
        mine = order[: len(self) * replicas][rank::replicas]
        epoch = self.epoch
        for index in mine[self.start :].tolist():
            yield SampleKey(epoch, index)


class StatefulLoader:
    """Mixin of loaders that know their position and can return to it.

    Args:
        order: the order of the samples.
        batch_size: per process; the last, incomplete batch is dropped.
    """

    def start_at(self, order: EpochSampler, batch_size: int) -> None:
        """Takes over the position of ``order``; called by constructors."""
        self.order, self._per_batch = order, batch_size
        self._served_of = order.epoch
        self.served = 0

    def __len__(self) -> int:
        return len(self.order) // self._per_batch

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the remaining batches of the epoch, and counts them."""
        epoch, first = self.order.epoch, self.order.start // self._per_batch
        self._served_of, self.served = epoch, first
        for batch in batches:
            self.served += 1
            yield batch
        if self.order.epoch == epoch:
            self.order.start = 0

    def state_dict(self) -> dict[str, int]:
        """Position of the next batch: epoch, and number of its batches already served."""
        epoch = self.order.epoch
        # `set_epoch` may have set an epoch of which nothing was served yet.
        served = self.served if epoch == self._served_of else 0
        if served >= len(self):
            return {"epoch": epoch + 1, "batches": 0}
        return {"epoch": epoch, "batches": served}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to a position from :meth:`state_dict`."""
        self.order.epoch = state["epoch"]
        self.order.start = state["batches"] * self._per_batch
        self._served_of, self.served = state["epoch"], state["batches"]
