"""A loader in order that leaves out what cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from solo_ext.data.datasets import FixedViews
from solo_ext.data.reading import UnreadableImage
from solo_ext.data.unreadable import MOST_IN_A_ROW, Skipping, too_many
from solo_ext.data.workers import WorkerLoader


class FixedLoader(WorkerLoader):
    """Batches ``(images, targets)`` in order; without the images that cannot be read.

    They are left out where the data set is :class:`solo_ext.data.unreadable.Skipping`, and refused
    else. A batch that loses images is smaller, one that loses all is not served.

    Attributes:
        skipped: indices that the last pass left out, in order.

    Args:
        views: the data set.
        batch_size: per process.
        num_workers: worker processes; batches do not depend on it.
        start_method: of the workers; ``None`` takes Python's default.
    """

    def __init__(
        self,
        views: FixedViews,
        batch_size: int,
        num_workers: int = 0,
        start_method: str | None = None,
    ) -> None:
        self.skipped: list[int] = []
        self._skips = isinstance(views.images, Skipping)
        super().__init__(
            views,
            batch_size=batch_size,
            num_workers=num_workers,
            start_method=start_method,
            # A loader without one draws from the global generator.
            generator=torch.Generator(),
            collate_fn=_collate_readable if self._skips else None,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._skips:
            yield from super().__iter__()
            return
        assert self.batch_size is not None
        self.skipped, in_a_row, served = [], 0, False
        for number, (batch, readable) in enumerate(super().__iter__()):
            for place, fine in enumerate(readable):
                in_a_row = 0 if fine else in_a_row + 1
                if not fine:
                    self.skipped.append(number * self.batch_size + place)
                if in_a_row >= MOST_IN_A_ROW:
                    raise self._too_many(in_a_row)
            if batch is not None:
                served = True
                yield batch
        if not served:
            raise self._too_many(in_a_row)

    def _too_many(self, count: int) -> UnreadableImage:
        views: Any = self.dataset
        return too_many(count, views.images, self.skipped[-1])


def _collate_readable(items: Sequence[Any]) -> tuple[Any, list[bool]]:
    """The batch of the items that are there, ``None`` without any; and which are there."""
    there = [item for item in items if item is not None]
    return default_collate(there) if there else None, [item is not None for item in items]
