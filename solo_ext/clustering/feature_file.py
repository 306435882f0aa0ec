"""Rows of features in a file, of which one part at a time is in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

# Elements of a part that is read ahead: 16 MiB.
_PART = 2**22
# Rows that are selected at a time: for rows far apart, the system maps 64 KiB around each.
_APART = 512
_AROUND = 2**16
_ITEM = 4


class FeatureFile:
    """A matrix (n, D) of fp32 in a file that is mapped into memory; zeros at first.

    It is read like a tensor by ``rows[start:stop]`` and ``rows.index_select(0, numbers)``, which
    return copies on ``device``, and written by ``rows[numbers] = values``. Only the part in use is
    in memory: pages are released to the file as soon as they were read or written.

    The file is unnamed, so its space is free as soon as it is closed or the process ends, even if
    killed. All of its space is allocated at once: a full disk raises an error here, and not a
    signal in the middle of a write, which would end the process.

    Args:
        folder: where the file lies; created if missing.
        count: n.
        width: D.
        device: of the copies that are returned.

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
        # TemporaryFile creates a file without a name, or removes the name at once.
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
        """Selects rows by their numbers, like a tensor's method.

        Args:
            dim: 0.
            index: (m,) int64; ascending numbers are read fastest.

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
        """Closes the file; its rows can no longer be read."""
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
        """Releases the pages of the rows from ``start`` up to ``stop``.

        Releasing the whole mapping would take longer the larger it is.
        """
        if hasattr(mmap, "MADV_DONTNEED") and start < stop:
            # Written data stays in the file, because the mapping is shared with it.
            size = _ITEM * self.shape[1]
            first = max(0, start * size - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(len(self._map), stop * size + _AROUND)
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _range(numbers: Tensor) -> tuple[int, int]:
    """Smallest range of rows that contains these numbers."""
    if not len(numbers):
        return 0, 0
    low, high = numbers.aminmax()
    return int(low), int(high) + 1


Features = Tensor | FeatureFile
"""Rows of features: in memory, or in a file."""
