"""E-steps of several granularities, and their comparison."""

from __future__ import annotations

from typing import Any

import torch

from solo_ext.clustering import e_step

SIZES = [20, 60, 20]


def steps(x: Any, **options: Any) -> list[Any]:
    """A cold E-step and a warm one, which relocates, in a row."""
    ids = torch.arange(len(x))
    cold = e_step(x, ids, SIZES, temperature=0.2, iterations=4, **options)
    options.pop("restarts", None)
    init = [g.means for g in cold]
    return cold + e_step(x, ids, SIZES, temperature=0.2, init=init, iterations=3, **options)


def same(found: list[Any], expected: list[Any], samples: Any = slice(None)) -> None:
    """Equal to the last bit; the assignments to those expected of some samples."""
    for one, two in zip(found, expected, strict=True):
        assert one.objective == two.objective
        for name in ("means", "concentration", "sizes"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        assert torch.equal(one.assignments, two.assignments[samples])
