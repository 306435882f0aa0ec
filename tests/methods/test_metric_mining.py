"""Which negatives the triplets of ``metric`` take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.losses import triplet_loss_func
from solo_ext.methods import Metric

Build = Callable[..., Any]
CLASSES = torch.tensor([0, 1, 1, 2, 0])


def on_a_line(*places: float) -> Tensor:
    """Embeddings (N, 8) at some distances along one axis."""
    rows = torch.zeros(len(places), 8)
    rows[:, 0] = torch.tensor(places)
    return rows.requires_grad_()


def mined(build: Build, mining: str, a: Tensor, b: Tensor) -> tuple[Any, list[int]]:
    """The criterion, and the row of b that each row of a takes."""
    method = build(Metric, loss="triplet_loss_func", mining=mining, classes="label")
    seen: list[Tensor] = []

    def note(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        seen.extend((anchor, positive, negative))
        return triplet_loss_func(anchor, positive, negative)

    method.criterion.loss = note
    method.criterion([a, b], CLASSES)
    assert torch.equal(seen[0], a)
    assert torch.equal(seen[1], b)
    return method, [int((b == row).all(1).nonzero()[0]) for row in seen[2]]


A = on_a_line(0.0, 10.0, 20.0, 30.0, 40.0)
B = on_a_line(3.0, 9.0, 23.0, 1.0, 100.0)
"""Rows 0 and 4 are of one class, 1 and 2 of one. Distances of row 0 to others: 9, 23, 1."""


def test_hard_takes_the_nearest_of_another_class(build: Build) -> None:
    # Of row 1, at 10: 3, 1 and 100. Of row 2, at 20: the same. Row 3: 23; row 4: 23.
    assert mined(build, "hard", A, B)[1] == [3, 0, 0, 2, 2]


def test_semi_hard_takes_the_nearest_beyond_the_positive(build: Build) -> None:
    # Row 0's positive is at 3: not 1, but 9. Row 1: beyond 1 the nearest is 3. Row 2: beyond 3.
    # Row 3's positive is 29 away: only 100 is farther. Row 4's 60: nothing is, and 1 is farthest.
    assert mined(build, "semi_hard", A, B)[1] == [1, 0, 0, 4, 3]


def test_random_takes_the_next_of_another_class(build: Build) -> None:
    assert mined(build, "random", A, B)[1] == [1, 3, 3, 4, 1]


@pytest.mark.parametrize("mining", ["hard", "semi_hard", "random"])
def test_without_another_class_there_is_nothing_to_learn(
    build: Build, features: Any, gradients: Any, mining: str
) -> None:
    """Zero with zero gradient; rows that have a negative are left as they are."""
    method = build(Metric, loss="triplet_loss_func", mining=mining, classes="label")
    views, one = features(2), torch.zeros(4, dtype=torch.long)
    loss, metrics = method.compare(views, torch.arange(4), one)
    assert loss.item() == 0
    assert not any(g.any() for g in gradients(loss, views))
    assert metrics["train_mined_similarity"].isfinite()
    loss, _ = method.compare([views[0].detach()] * 2, torch.arange(4), one)
    assert loss.item() == 0


@pytest.mark.parametrize("mining", ["hard", "semi_hard"])
def test_collapsed_embeddings(build: Build, gradients: Any, mining: str) -> None:
    method = build(Metric, loss="triplet_loss_func", mining=mining)
    views = [torch.ones(4, 8).requires_grad_() for _ in range(2)]
    loss, metrics = method.compare(views, torch.arange(4), torch.arange(4))
    assert loss.item() == pytest.approx(1.0, abs=1e-5)
    assert all(g.isfinite().all() for g in gradients(loss, views))
    assert metrics["train_mined_similarity"] == pytest.approx(1.0)
