"""What several processes held in the end, against what one on the joined batch did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.matrix.two_steps import BATCH, QUEUE

Held = dict[str, Any]
QUEUES = ("queue", "support_set")
"""Buffers that take a batch per step, as it is gathered."""
BY_SAMPLE = {"prototypes.assignments": 1, "bank.value": 0, "bank.filled": 0}
"""Tables that are shared out, which the first process joins, and their samples' dimension."""


def differing(ranks: list[Held], own: tuple[str, ...] = ()) -> list[str]:
    """What is not the same to the last bit in all processes, but for what each has its part of."""
    first, found = ranks[0]["state"], list[str]()
    for number, rank in enumerate(ranks):
        for key, value in rank["state"].items():
            expected = first[key]
            if number and key in BY_SAMPLE:
                dim = BY_SAMPLE[key]
                expected = expected.movedim(dim, 0)[number :: len(ranks)].movedim(0, dim)
            if not key.startswith(own) and not torch.equal(value, expected):
                found.append(f"{key} of process {number}")
    return found


def assert_trained_alike(alone: Held, ranks: list[Held], own: tuple[str, ...] = ()) -> None:
    """The steps changed all that learns, and all processes hold the same."""
    for found in (alone, *ranks):
        assert "error" not in found, found["error"]
    for names in alone["trained"]:
        way = furthest(alone["state"], alone["start"], names)
        assert 1e-5 < way < 10, f"changed by {way}: {names}"
    assert not differing(ranks, own)


def apart(a: Held, b: Held) -> list[str]:
    """What is not the same, weights to a hundredth of what the steps changed."""
    found, one, other = weights_apart(a, b, 1 / 100), a["state"], b["state"]
    trained = {name for names in b["trained"] for name in names}
    return found + [key for key in one.keys() - trained if not _same(one[key], other[key])]


def weights_apart(a: Held, b: Held, share: float) -> list[str]:
    """Which trained weights are not the same, to a share of what the steps changed."""
    assert "error" not in b, b["error"]
    one, other, found = a["state"], b["state"], list[str]()
    for names in b["trained"]:
        # What the initial weights share must not hide what the steps changed.
        allowed = share * furthest(other, b["start"], names)
        found += [name for name in names if not furthest(one, other, [name]) <= allowed]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one, other, 1e-4, 1e-5).all())


def furthest(one: Held, other: Held, names: list[str]) -> float:
    """The largest difference of any value."""
    return max(float((one[name] - other[name]).abs().max()) for name in names)


def in_one_order(ranks: list[Held], own: tuple[str, ...] = (), batch: int = BATCH) -> Held:
    """What the first of R processes held, rows of queues in the order of one process.

    Images are dealt out in turn and keys gathered rank by rank: row ``r * batch / R + i`` of what
    a step wrote is row ``i * R + r`` of one process's. Of the queues ``own`` each process has its
    part; ``batch`` counts the images of all processes.
    """
    count, state = len(ranks), dict(ranks[0]["state"])
    for key in [key for key in state if key.startswith(QUEUES)]:
        apiece = QUEUE // count if key.startswith(own) else QUEUE
        if apiece not in state[key].shape:
            continue
        axis = state[key].shape.index(apiece)
        held = [rank["state"][key].movedim(axis, 0) for rank in ranks]
        if apiece == QUEUE:
            written = held[0].unflatten(0, (-1, count, batch // count))
        else:
            written = torch.stack([x.unflatten(0, (-1, batch // count)) for x in held], dim=1)
        state[key] = written.transpose(1, 2).flatten(0, 2).movedim(0, axis)
        if apiece == QUEUE:
            # No step has written the others.
            start, now = ranks[0]["start"][key], ranks[0]["state"][key]
            state[key] = torch.where(now == start, now, state[key])
    return {**ranks[0], "state": state}
