"""Relocations lower the objective where Lloyd's steps are stuck, and never raise it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.clustering import kmeans, relocation
from solo_ext.clustering.relocation import Relocation, halves, merge_costs
from solo_ext.clustering.rows import exact_scale, on_grid, rows_of


def squares(x: Tensor, assignments: Tensor, count: int) -> float:
    """Sum of the squared distances to the means of the clusters, by a loop."""
    parts = (x[assignments == c].double() for c in range(count))
    return sum(float((own - own.mean(0)).square().sum()) for own in parts if len(own))


def totals(x: Tensor, assignments: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor]:
    """Sums on the grid and sizes."""
    sums = torch.zeros(count, x.shape[1], dtype=torch.float64)
    sums.index_add_(0, assignments, on_grid(x, scale))
    return sums, torch.bincount(assignments, minlength=count)


def relocated(x: Tensor, assignments: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means and sizes after the relocations from an assignment."""
    rows = rows_of(x, None, False)
    scale = exact_scale(rows.largest, rows.total)
    move = Relocation(rows, count, scale)
    sums, sizes = move(assignments, *totals(x, assignments, count, scale))
    return sums / sizes.clamp_min(1)[:, None] / scale, sizes


def groups(sizes: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tight groups on a line 10 apart, and the group of each row."""
    draw = torch.Generator().manual_seed(seed)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = 0.1 * torch.randn(len(group), 3, generator=draw, dtype=torch.float64)
    x[:, 0] += 10 * group
    return x, group


@st.composite
def partitions(draw: st.DrawFn, most: int = 60) -> tuple[Tensor, Tensor, int]:
    """Rows with duplicates, any assignment of them: also empty clusters and single rows."""
    n = draw(st.integers(1, most))
    count = draw(st.sampled_from([1, n]) | st.integers(1, n))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, draw(st.integers(1, 4)), generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x[torch.randint(n, (n,), generator=generator) // draw(st.integers(1, 5))]
    used = draw(st.integers(1, count))
    assignments = torch.randint(used, (n,), generator=generator)
    return x, assignments, count


@settings(deadline=None, max_examples=300)
@given(partitions())
def test_never_raises_the_objective(partition: tuple[Tensor, Tensor, int]) -> None:
    x, assignments, count = partition
    means, sizes = relocated(x, assignments, count)
    assert int(sizes.sum()) == len(x)
    assert sizes.min() >= 0
    apart = torch.cdist(x, means[sizes > 0]).square().amin(1).sum()
    assert float(apart) <= squares(x, assignments, count) * (1 + 1e-9) + 1e-9


@settings(deadline=None, max_examples=100)
@given(partitions(most=20))
def test_costs_and_gains_are_those_of_a_loop(partition: tuple[Tensor, Tensor, int]) -> None:
    x, assignments, count = partition
    rows = rows_of(x, None, False)
    scale = exact_scale(rows.largest, rows.total)
    sums, sizes = totals(x, assignments, count, scale)
    means = sums / sizes.clamp_min(1)[:, None] / scale
    cost, partner = merge_costs(means, sizes, rows)
    now = squares(x, assignments, count)
    for c in range(count):
        other = [j for j in range(count) if j != c and sizes[j]]
        if not sizes[c]:
            assert (cost[c], partner[c]) == (0, c)
        elif not other:
            assert cost[c] == torch.inf
        else:
            merged = [squares(x, assignments.where(assignments != c, j), count) for j in other]
            assert float(cost[c]) == pytest.approx(min(merged) - now, rel=1e-4, abs=1e-5)
            joined = assignments.where(assignments != c, partner[c])
            assert float(cost[c]) == pytest.approx(squares(x, joined, count) - now, abs=1e-9)
    split = halves(rows, assignments, torch.arange(count), sums, sizes, scale)
    assert (split.sizes <= sizes).all()
    assert (split.gains >= 0).all()
    assert (split.gains[(split.sizes == 0) | (split.sizes == sizes)] == 0).all()


def test_a_split_finds_two_groups() -> None:
    x, group = groups([40, 25])
    rows = rows_of(x, None, False)
    scale = exact_scale(rows.largest, rows.total)
    together = torch.zeros_like(group)
    split = halves(rows, together, torch.tensor([0]), *totals(x, together, 1, scale), scale)
    assert split.sizes.item() in (40, 25)
    expected = squares(x, together, 1) - squares(x, group, 2)
    assert split.gains.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaves_an_optimum_where_lloyd_is_stuck(dtype: torch.dtype) -> None:
    x, group = groups([30, 30, 30, 30])
    centres = torch.stack([x[group == g].mean(0) for g in range(4)])
    # Two prototypes for the first group, one for the last two.
    init = torch.stack([x[0], x[1], centres[1], centres[2:].mean(0)]).to(dtype)
    x = x.to(dtype)
    stuck = kmeans(x, 4, init=init, iterations=50, relocate=False)
    found = kmeans(x, 4, init=init, iterations=50)
    assert stuck.objective > 10
    assert found.objective == pytest.approx(squares(x, group, 4) / len(x), rel=1e-5)
    # Also when nothing moves any more.
    again = kmeans(x, 4, init=stuck.means, iterations=5)
    assert again.objective == pytest.approx(found.objective, rel=1e-5)


@pytest.mark.parametrize(("fourth", "stays"), [(6.2, True), (5.8, False)])
def test_a_split_must_gain_more_than_the_merge_costs(fourth: float, stays: bool) -> None:
    """To split 0 and 1 gains 0.5; to merge 5 and the fourth costs 0.72 or 0.32."""
    x = torch.tensor([[0.0], [1.0], [5.0], [fourth]], dtype=torch.float64)
    _, sizes = relocated(x, torch.tensor([0, 0, 1, 2]), 3)
    assert (sizes.tolist() == [2, 1, 1]) == stays


def test_cold_starts_relocate_only_when_asked() -> None:
    x, _ = groups([20] * 12)
    plain = kmeans(x, 12, seed=1)
    assert plain.objective == kmeans(x, 12, seed=1, relocate=False).objective
    assert plain.objective > 2
    assert kmeans(x, 12, seed=1, relocate=True).objective < 0.1


def test_an_empty_cluster_comes_first() -> None:
    x, group = groups([30, 30, 30])
    assignments = torch.tensor([0, 2, 2])[group]
    means, sizes = relocated(x, assignments, 3)
    assert sizes.tolist() == [30, 30, 30]
    centres = torch.stack([x[group == g].mean(0) for g in range(3)])
    apart = torch.cdist(means, centres).amin(1)
    assert apart.max() < 1e-9


def second_best() -> tuple[Tensor, Tensor]:
    """Rows in four clusters, of which the widest is not the one to split."""
    x = torch.zeros(100, 41, dtype=torch.float64)
    # The widest cluster, of which no split gains more than 1.
    x[:40, :40] = torch.eye(40)
    # Two clusters whose merger costs 2, and one of which a split gains 20.
    x[40:60, 40], x[60:80, 40] = 100, 100 + 0.2**0.5
    x[80:90, 40], x[90:, 40] = 200, 202
    assignments = torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([40, 20, 20, 20]))
    return x, assignments


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "_CANDIDATES", 1)
    x, assignments = second_best()
    rows = rows_of(x, None, False)
    scale = exact_scale(rows.largest, rows.total)
    before = totals(x, assignments, 4, scale)
    move = Relocation(rows, 4, scale)
    assert move(assignments, *before)[0] is before[0]
    _, sizes = move(assignments, *before)
    assert sorted(sizes.tolist()) == [10, 10, 40, 40]


def test_order_and_repetition_do_not_matter() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 6, generator=draw)
    init = x[0] + 0.1 * x[:40]
    first = kmeans(x, 40, init=init, iterations=4)
    assert torch.equal(kmeans(x, 40, init=init, iterations=4).means, first.means)
    order = torch.randperm(1500, generator=draw)
    other = kmeans(x[order], 40, init=init, iterations=4, row_ids=order)
    assert torch.equal(other.means, first.means)
    assert first.objective < kmeans(x, 40, init=init, iterations=4, relocate=False).objective


def test_memory_is_bounded() -> None:
    n, k = 20_000, 4000
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    rows = rows_of(x, None, False)
    scale = exact_scale(rows.largest, rows.total)
    assignments = torch.arange(n) % k
    given_totals = totals(x, assignments, k, scale)
    peak = peak_bytes(lambda: Relocation(rows, k, scale)(assignments, *given_totals))
    # Of the K x K costs a few tiles.
    assert 4 * 256 * k < peak < 4 * k * k / 3
