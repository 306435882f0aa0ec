"""Rows of features in a file, of which a part at a time is in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

# Numbers of a part that is read ahead: 16 MiB.
_PART = 2**22
# Rows that are selected at a time: where they lie far apart, the system maps 64 KiB around each.
_APART = 512
_AROUND = 2**16
_ITEM = 4


class FeatureFile:
    """A matrix (n, D) of fp32 in a file that is mapped into memory; zeros at first.

    It is read by ``rows[start:stop]`` and ``rows.index_select(0, numbers)``, as a tensor is, and
    written by ``rows[numbers] = values``. What is handed out is a copy on ``device``. Only the part
    at hand is resident: pages that were read or written are given back at once, to the file.

    The file has no name from the moment it is opened. Its space is free as soon as it is closed or
    the process ends, killed or not. All of its space is taken at once: a disk that is full fails
    here, not in the middle of a write, which would end the process by a signal.

    Args:
        folder: where the file lies; made if it is not there.
        count: n.
        width: D.
        device: of what is handed out.

    Raises:
        OSError: the folder cannot be written, or has no room.

    Example:
        >>> rows = FeatureFile(Path(tempfile.gettempdir()), 5, 3)
        >>> rows[torch.tensor([4, 1])] = torch.ones(2, 3)
        >>> rows[:].sum(1)
        tensor([0., 3., 0., 0., 3.])
        >>> rows.close()
    """

    dtype = torch.float32
    ndim = 2

    def __init__(
        self, folder: Path, count: int, width: int, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = torch.Size((count, width))
        self.device = torch.device(device)
        size = max(1, _ITEM * count * width)
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name, or with one that is taken from it at once.
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._rows = torch.empty(0, width)
        if count and width:
            self._rows = torch.frombuffer(self._map, dtype=self.dtype, count=count * width)
            self._rows = self._rows.view(count, width)
        self._ahead = max(1, _PART // max(1, width))
        self._start, self._part = 0, self._rows.new_empty(0, width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"rows in steps of {step}: read them in steps of 1")
        if stop - start > self._ahead:
            return self._copy(start, stop)
        if start < self._start or stop > self._start + len(self._part):
            self._start = start
            self._part = self._copy(start, min(len(self), start + self._ahead))
        return self._part[start - self._start : stop - self._start]

    def __setitem__(self, numbers: Tensor, values: Tensor) -> None:
        self._start, self._part = 0, self._part[:0]
        numbers = numbers.cpu()
        self._rows[numbers] = values.to("cpu", self.dtype)
        self._give_back(*_range(numbers))

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Rows by their numbers, as that of a tensor.

        Args:
            dim: 0.
            index: (m,) int64; ascending ones are read fastest.

        Returns:
            (m, D).
        """
        if dim != 0:
            raise ValueError(f"dim={dim}: rows are selected along 0")
        found = torch.empty(len(index), self.shape[1], device=self.device)
        parts = zip(torch.split(index.cpu(), _APART), torch.split(found, _APART), strict=True)
        for wanted, place in parts:
            place.copy_(self._rows.index_select(0, wanted))
            self._give_back(*_range(wanted))
        return found

    def close(self) -> None:
        """Lets the file go; nothing can be read any more."""
        self._rows = self._part = torch.empty(0, self.shape[1])
        self._map.close()

    def _copy(self, start: int, stop: int) -> Tensor:
        found = torch.empty(max(0, stop - start), self.shape[1], device=self.device)
        for first in range(start, stop, self._ahead):
            last = min(stop, first + self._ahead)
            found[first - start : last - start] = self._rows[first:last]
            self._give_back(first, last)
        return found

    def _give_back(self, start: int, stop: int) -> None:
        """Gives back the pages of the rows from ``start`` up to ``stop``.

        Not those of the whole mapping: to walk through it takes the longer, the larger it is.
        """
        if hasattr(mmap, "MADV_DONTNEED") and start < stop:
            # What was written stays in the file: the mapping is shared with it.
            size = _ITEM * self.shape[1]
            first = max(0, start * size - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(len(self._map), stop * size + _AROUND)
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _range(numbers: Tensor) -> tuple[int, int]:
    """The rows from the first up to the last of these numbers."""
    if not len(numbers):
        return 0, 0
    low, high = numbers.aminmax()
    return int(low), int(high) + 1


Features = Tensor | FeatureFile
"""Rows of features: in memory, or in a file."""
