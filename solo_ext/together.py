"""Ranks that end together, and that wait for each other without running into a timeout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from solo_ext.distributed import gather_objects, max_over_ranks, rank, world_size
from solo_ext.errors import UserError

T = TypeVar("T")
# Seconds between two signs of life of a rank that works alone.
_BEAT = 1.0
_KNOWN = "_known_to_all_ranks"


class RankError(RuntimeError):
    """Another rank has failed; the message says which one and why."""


@contextlib.contextmanager
def together(device: torch.device, among: bool = True) -> Iterator[None]:
    """An error of one rank within the block ends the block on every rank.

    Else the others would wait for it in a collective until the process group's timeout. The block
    calls :func:`meet` before its collectives, and all ranks alike; the rank that failed comes to
    the next meeting and says why. Blocks may lie within each other.

    Args:
        device: one that the process group can send from.
        among: whether the block is of all ranks; else nothing is done.

    Raises:
        RankError: on the ranks that have not failed themselves.
        UserError: in its place, where the other rank's error is one.
    """
    if not among or world_size() == 1:
        yield
        return
    try:
        yield
        meet(device)
    except Exception as error:
        if not getattr(error, _KNOWN, False):
            # Where the process group itself has failed, the others know.
            with contextlib.suppress(RuntimeError):
                _exchange(error, device)
        raise


def meet(device: torch.device) -> None:
    """Waits for all ranks, within :func:`together`.

    Args:
        device: one that the process group can send from.

    Raises:
        RankError: another rank failed.
        UserError: in its place, where the other rank's error is one.
    """
    if world_size() > 1:
        _exchange(None, device)


def _exchange(error: Exception | None, device: torch.device) -> None:
    failed = max_over_ranks(torch.tensor(int(error is not None), device=device))
    if not failed:
        return
    own = None if error is None else (str(error), type(error).__name__, _is_users(error))
    said = gather_objects(own)
    if error is not None:
        setattr(error, _KNOWN, True)
        return
    first = next(number for number, text in enumerate(said) if text is not None)
    text, name, users = said[first]
    told: Exception
    told = (
        UserError(f"rank {first}: {text}") if users else RankError(f"rank {first}: {name}: {text}")
    )
    setattr(told, _KNOWN, True)
    raise told


def _is_users(error: Exception) -> bool:
    return isinstance(error, UserError)


def on_first(work: Callable[[], T], device: torch.device) -> T | None:
    """Runs ``work`` on rank 0 while the other ranks wait, however long it takes.

    In a collective they would wait until the process group's timeout. Here a thread of rank 0 gives
    a sign of life every second, so that no collective lasts longer; ``work`` must let go of the
    interpreter's lock now and then, as Python and most native code do.

    Args:
        work: without collectives.
        device: one that the process group can send from.

    Returns:
        What ``work`` returned on rank 0, ``None`` elsewhere.

    Raises:
        RankError: another rank has failed within :func:`together` before it came here.
        UserError: in its place, where its error is one.
    """
    if world_size() == 1:
        return work()
    meet(device)
    if rank() > 0:
        while max_over_ranks(torch.tensor(0, device=device)):
            pass
        return None
    done = threading.Event()
    beats = threading.Thread(target=_beat, args=(done, device), daemon=True)
    beats.start()
    try:
        return work()
    finally:
        done.set()
        beats.join()


def _beat(done: threading.Event, device: torch.device) -> None:
    if device.type == "cuda":
        # What is set in one thread is not in another.
        torch.cuda.set_device(device)
    # Where the process group itself has failed, the next collective of all says so.
    with contextlib.suppress(RuntimeError):
        busy = True
        while busy:
            busy = not done.wait(_BEAT)
            max_over_ranks(torch.tensor(int(busy), device=device))
