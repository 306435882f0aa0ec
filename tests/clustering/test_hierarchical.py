"""Hierarchical k-means: its search, its objective beside flat, and what it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering import kmeans
from solo_ext.clustering.hierarchical import NearestInGroups
from solo_ext.clustering.lloyd import assign, scores
from solo_ext.clustering.rows import rows_of


def made(kind: str, n: int = 6000, d: int = 16) -> Tensor:
    """Unit rows around 150 directions, or rows whose lengths have heavy tails."""
    draw = torch.Generator().manual_seed(0)
    modes = torch.randn(150, d, generator=draw)
    x = modes[torch.randint(150, (n,), generator=draw)] + 0.6 * torch.randn(n, d, generator=draw)
    if kind == "blobs":
        return F.normalize(x, dim=1)
    chi = torch.randn(n, 3, generator=draw).square().sum(1, keepdim=True)
    return x / (chi / 3).sqrt()


@pytest.mark.parametrize(("kind", "most"), [("blobs", 1.03), ("heavy tails", 1.0)])
def test_objective_is_near_that_of_flat(kind: str, most: float) -> None:
    """Directions without a hierarchy are the hardest for groups."""
    x = made(kind)
    flat = kmeans(x, 200, backend="torch")
    found = kmeans(x, 200, backend="hierarchical")
    assert found.backend == "hierarchical"
    assert found.objective < most * flat.objective
    # The steps do their part: one leaves it far above.
    assert kmeans(x, 200, iterations=1, backend="hierarchical").objective > 1.05 * flat.objective


@pytest.mark.parametrize("kind", ["blobs", "heavy tails"])
def test_a_warm_start_goes_on(kind: str) -> None:
    x = made(kind)
    old = kmeans(x, 200, iterations=5, backend="torch")
    flat = kmeans(x, 200, init=old.means, iterations=5, backend="torch")
    found = kmeans(x, 200, init=old.means, iterations=5, backend="hierarchical")
    assert found.objective < min(1.03 * flat.objective, 0.98 * old.objective)


def by_loop(x: Tensor, means: Tensor, centres: Tensor) -> list[int]:
    """The nearest of the means whose nearest centre is one of a row's two nearest."""
    group = torch.cdist(means, centres).argmin(1)
    found = []
    for row in x:
        near = (centres - row).norm(dim=1).topk(2, largest=False).indices
        allowed = [k for k in range(len(means)) if group[k] in near]
        found.append(
            min(allowed or range(len(means)), key=lambda k: float((row - means[k]).norm()))
        )
    return found


def test_search_is_a_loop_over_two_groups() -> None:
    x = made("heavy tails", 300).double()
    nearest = NearestInGroups(rows_of(x, None, False))
    first = nearest(x[:40])
    centres = nearest._centres
    assert centres is not None
    assert len(centres) == 6
    assert first.tolist() == by_loop(x, x[:40], centres)
    # Means move, groups stay; here half of them are left without means.
    later = torch.where((torch.arange(40) % 2 == 0)[:, None], centres[0], centres[1]) + x[:40] / 99
    assert nearest(later).tolist() == by_loop(x, later, centres)
    assert len(set(assign(later, centres).tolist())) < 4


def test_compares_few_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(features: Tensor, means: Tensor, centre: Tensor, wanted: Any = None) -> Any:
        nonlocal compared
        compared += len(means) * len(features if wanted is None else wanted)
        return scores(features, means, centre, wanted)

    x = made("blobs")
    nearest = NearestInGroups(rows_of(x, None, False))
    nearest(x[:400])
    monkeypatch.setattr("solo_ext.clustering.lloyd.scores", counted)
    found = nearest(x[:400])
    assert 0 < compared < 0.2 * len(x) * 400
    # And yet finds the nearest mean of most rows.
    assert (found == assign(x, x[:400])).float().mean() > 0.8


@pytest.mark.parametrize("init", [None, 30])
def test_same_seed_same_bits_in_any_order(init: int | None) -> None:
    x = made("blobs", 2000)
    options: dict[str, Any] = {"backend": "hierarchical", "iterations": 6, "seed": 3}
    if init:
        options["init"] = x[:100]
    first = kmeans(x, 100, **options)
    torch.manual_seed(9)
    again = kmeans(x, 100, **options)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    other = kmeans(x[order], 100, row_ids=order, **options)
    for found in (again, other):
        assert torch.equal(found.means, first.means)
        assert found.objective == first.objective
    assert torch.equal(other.assignments, first.assignments[order])
    if not init:
        assert not torch.equal(kmeans(x, 100, **options | {"seed": 4}).means, first.means)


def test_last_assignment_is_to_the_nearest_of_all() -> None:
    x = made("heavy tails", 1000).double()
    found = kmeans(x, 90, iterations=3, backend="hierarchical")
    apart = torch.cdist(x, found.means).min(1)
    assert torch.equal(found.assignments, apart.indices)
    torch.testing.assert_close(found.distances, apart.values, rtol=0, atol=1e-6)


def test_degenerate_inputs() -> None:
    x = made("blobs", 60)
    options: dict[str, Any] = {"backend": "hierarchical", "iterations": 4}
    assert kmeans(x, 60, **options).objective == pytest.approx(0, abs=1e-9)
    assert torch.bincount(kmeans(x, 59, **options).assignments).sum() == 60
    torch.testing.assert_close(kmeans(x, 1, **options).means[0], x.mean(0))
    equal = kmeans(x[:1].repeat(50, 1), 9, **options)
    assert equal.objective == pytest.approx(0, abs=1e-9)
    # Of two values, each many times.
    doubled = kmeans(x[:2].repeat(40, 1), 10, **options)
    assert doubled.objective == pytest.approx(0, abs=1e-6)
    far = x.clone()
    far[0] *= 1e6
    assert kmeans(far, 8, **options).means.isfinite().all()
    assert kmeans(x.half(), 8, **options).means.dtype == torch.float32


def test_means_that_begin_empty_get_rows() -> None:
    x = made("blobs", 2000)
    init = x[:100].clone()
    init[10:] = 1e3
    found = kmeans(x, 100, init=init, iterations=25, backend="hierarchical")
    assert torch.bincount(found.assignments, minlength=100).min() > 0
    assert found.objective < 1.1 * kmeans(x, 100, backend="torch").objective
