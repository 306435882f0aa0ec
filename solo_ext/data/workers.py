"""How a loader starts its workers."""

from __future__ import annotations


def worker_context(num_workers: int, start_method: str | None) -> str | None:
    """What a ``DataLoader`` takes as ``multiprocessing_context``.

    Args:
        num_workers: a loader without workers takes no context.
        start_method: ``data.start_method``; ``None`` is Python's default.
    """
    return start_method if num_workers else None
