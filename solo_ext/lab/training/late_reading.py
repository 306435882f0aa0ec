"""Values of the device that the host reads without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncHostCopy:
    """One tensor on its way to the host.

    From a GPU it is copied into pinned memory and read once the copy is done, some steps later;
    from elsewhere it is there at once.

    Attributes:
        pending: whether a tensor was sent and not taken.
        immediate: whether the last one sent could be taken at once.
    """

    def __init__(self) -> None:
        self.pending = self.immediate = False
        self._value: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def send(self, value: Tensor) -> None:
        """Begins the copy; one that was not taken is lost.

        Args:
            value: of one shape and type for all calls.
        """
        value = value.detach()
        self.pending, self.immediate = True, value.device.type != "cuda"
        if self.immediate:
            self._value = value.cpu().clone()
            return
        if self._value is None:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(value.device))

    def take(self, *, wait: bool = False) -> Tensor | None:
        """The tensor that was sent, ``None`` where there is none or it is still on its way.

        Args:
            wait: until it is there.
        """
        if not self.pending:
            return None
        if self._done is not None and not self._done.query():  # type: ignore[no-untyped-call]
            if not wait:
                return None
            self._done.synchronize()
        self.pending = False
        return self._value

    def drop(self) -> None:
        """Forgets what was sent."""
        self.pending = False
