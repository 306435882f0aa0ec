"""Rows of features in a file, of which one part at a time is in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

# Rows that are read at a time: for rows far apart, the system maps 64 KiB around each.
_PART = 512
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
        self.shape, self.device = torch.Size((count, width)), torch.device(device)
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
            held = torch.frombuffer(self._map, dtype=self.dtype, count=count * width)
            self._rows = held.view(count, width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, step = part.indices(len(self))
        return self.index_select(0, torch.arange(start, max(start, stop), step))

    def __setitem__(self, numbers: Tensor, values: Tensor) -> None:
        numbers = numbers.cpu()
        self._rows[numbers] = values.to("cpu", self.dtype)
        self._release(numbers)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """(m, D) rows by their numbers (m,), ``dim`` being 0; ascending ones are read fastest."""
        found = torch.empty(len(index), self.shape[1], device=self.device)
        parts = zip(torch.split(index.cpu(), _PART), torch.split(found, _PART), strict=True)
        for wanted, place in parts:
            place.copy_(self._rows.index_select(dim, wanted))
            self._release(wanted)
        return found

    def close(self) -> None:
        """Closes the file; its rows can no longer be read."""
        self._rows = torch.empty(0, self.shape[1])
        self._map.close()

    def _release(self, numbers: Tensor) -> None:
        """Releases the pages between the first and the last of these rows.

        Releasing the whole mapping would take longer the larger it is.
        """
        if hasattr(mmap, "MADV_DONTNEED") and len(numbers):
            # Written data stays in the file, because the mapping is shared with it.
            low, high = (int(number) for number in numbers.aminmax())
            size = _ITEM * self.shape[1]
            first = max(0, low * size - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(len(self._map), (high + 1) * size + _AROUND)
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


Features = Tensor | FeatureFile
"""Rows of features: in memory, or in a file."""
