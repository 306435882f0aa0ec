"""A training order that is a function of seed and epoch, and can be entered anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from solo_ext.core import distributed
from solo_ext.core.draws import mix


class SampleKey(NamedTuple):
    """What the sampler asks the data set for: a sample, and the epoch its augmentation is of."""

    epoch: int
    sample: int


class EpochSampler(Sampler[SampleKey]):
    """Permutation of the data set drawn from (seed, epoch), shared out over the ranks.

    Every rank yields the same number of samples: what does not divide by the number of ranks is
    left out of that epoch.

    Args:
        size: number of samples of the data set.
        seed: seed of the run.
        num_replicas: number of processes; those of ``torch.distributed`` by default.
        rank: this process; that of ``torch.distributed`` by default.
    """

    def __init__(
        self, size: int, seed: int, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.size, self.seed = size, seed
        self._replicas, self._rank = num_replicas, rank
        self.epoch = 0
        self.start = 0

    def _share(self) -> tuple[int, int]:
        # Read late: the process group may not exist when loaders are built.
        replicas = self._replicas or distributed.world_size()
        return replicas, distributed.rank() if self._rank is None else self._rank

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch`` from its first sample, unless it is already the current one."""
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
