"""k-means against a loop over rows and clusters, what it promises, and prototypes of a sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.clustering import (
    Clustering,
    cluster_concentration,
    kmeans,
    multi_granularity_kmeans,
    rows,
)
from solo_ext.clustering.lloyd import assign, distances_to
from solo_ext.clustering.rows import rows_of
from tests.clustering import e_steps


def sample(n: int, d: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def by_loop(x: list[list[float]], means: list[list[float]], steps: int) -> list[list[float]]:
    """Lloyd's algorithm in Python, for data where no cluster gets empty."""
    for _ in range(steps):
        members: list[list[list[float]]] = [[] for _ in means]
        for row in x:
            members[min(range(len(means)), key=lambda k: math.dist(row, means[k]))].append(row)
        means = [[math.fsum(c) / len(own) for c in zip(*own, strict=True)] for own in members]
    return means


def same(a: Clustering, b: Clustering) -> bool:
    """Whether two clusterings are equal bit by bit."""
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_equals_a_loop(steps: int) -> None:
    x = sample(90)
    found = kmeans(x, 6, init=x[:6], iterations=steps, relocate=False)
    expected = by_loop(x.tolist(), x[:6].tolist(), steps)
    assert found.iterations == steps
    torch.testing.assert_close(
        found.means, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )
    apart = torch.tensor(
        [[math.dist(row, mean) for mean in found.means.tolist()] for row in x.tolist()],
        dtype=torch.float64,
    )
    nearest = apart.min(dim=1)
    assert torch.equal(found.assignments, nearest.indices)
    torch.testing.assert_close(found.distances, nearest.values, rtol=1e-12, atol=0)
    assert found.objective == pytest.approx(nearest.values.square().mean().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_gives_fp32(dtype: torch.dtype) -> None:
    x = sample(200, dtype=dtype)
    found = kmeans(x, 4, iterations=5)
    assert found.means.dtype == found.distances.dtype == torch.float32
    exact = kmeans(x.double(), 4, iterations=5)
    torch.testing.assert_close(found.means.double(), exact.means, rtol=0, atol=1e-6)
    assert torch.equal(found.assignments, exact.assignments)


def test_a_common_offset_changes_nothing() -> None:
    x = sample(400, 8, dtype=torch.float32)
    found = kmeans(x + 500, 10, init=x[:10] + 500, precision="highest")
    plain = kmeans((x + 500).double(), 10, init=(x[:10] + 500).double())
    assert torch.equal(found.assignments, plain.assignments)


def test_objective_never_rises() -> None:
    x = sample(500)
    reached = [kmeans(x, 12, iterations=steps).objective for steps in range(1, 15)]
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < 0.97 * reached[0]


def test_seed() -> None:
    x = sample(300, dtype=torch.float32)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = kmeans(x, 9, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(kmeans(x, 9, seed=3), first)
    assert not torch.equal(kmeans(x, 9, seed=4).means, first.means)


def test_restarts_keep_the_lowest() -> None:
    x = sample(200)
    # More restarts draw what fewer do, and then some.
    reached = [kmeans(x, 15, iterations=3, restarts=r).objective for r in range(1, 9)]
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < reached[0]


def test_row_order_does_not_matter() -> None:
    x = sample(1000, 7, dtype=torch.float32)
    first = kmeans(x, 20)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    other = kmeans(x[order], 20, row_ids=order)
    assert torch.equal(other.means, first.means)
    assert torch.equal(other.assignments, first.assignments[order])
    assert other.objective == first.objective


def test_converged_start_stops_at_once() -> None:
    x = sample(300)
    first = kmeans(x, 8, iterations=500)
    assert first.iterations < 500
    again = kmeans(x, 8, init=first.means, iterations=500)
    assert again.iterations == 1
    assert torch.equal(again.means, first.means)


@pytest.mark.parametrize("kind", ["far away", "equal"])
def test_empty_clusters_are_refilled(kind: str) -> None:
    x = sample(400)
    init = x[:10].clone()
    init[3:] = 1e3 if kind == "far away" else init[0]
    found = kmeans(x, 10, init=init, iterations=25)
    sizes = torch.bincount(found.assignments, minlength=10)
    assert sizes.min() > 0
    assert found.objective < 1.1 * kmeans(x, 10, iterations=25).objective


def test_halves_of_a_split_cluster() -> None:
    x = sample(60, 4) + 5
    init = torch.stack([x.mean(0), x[0] + 1e6, x[0] - 1e6])
    found = kmeans(x, 3, init=init, iterations=1, relocate=False)
    mean = x.mean(0)
    e = torch.tensor([1, -1, 1, -1], dtype=torch.float64) / 1024
    # One donor only: the second empty cluster keeps its mean until there are more.
    expected = torch.stack([mean * (1 - e), mean * (1 + e), init[2]])
    torch.testing.assert_close(found.means, expected, rtol=0, atol=1e-11)


def test_autocast_does_not_matter() -> None:
    x = sample(300, 16, dtype=torch.float32)
    first = kmeans(x, 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(kmeans(x, 10), first)


def test_granularities_are_independent() -> None:
    x = sample(200)
    found = multi_granularity_kmeans(x, [5, 9, 5], seed=7, iterations=4)
    for position, (count, one) in enumerate(zip([5, 9, 5], found, strict=True)):
        assert same(one, kmeans(x, count, seed=7 + position, iterations=4))
    warm = multi_granularity_kmeans(x, [5, 9, 5], init=[c.means for c in found], iterations=2)
    assert same(warm[1], kmeans(x, 9, init=found[1].means, iterations=2))


def test_memory_is_bounded() -> None:
    n, k = 40_000, 500
    x = sample(n, 8, dtype=torch.float32)
    peak = peak_bytes(lambda: kmeans(x, k, iterations=3))
    # A tile of scores, and three int64 and some smaller vectors of n.
    assert 4 * 2**18 < peak < 4 * rows._TILE["cpu"] + 50 * n
    assert peak < 4 * n * k / 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters=0"),
        ({"num_clusters": 21}, "num_clusters=21.*20 rows"),
        ({"sample": 3}, "num_clusters=4.*3 rows"),
        ({"iterations": 0}, "iterations=0"),
        ({"restarts": 0}, "restarts=0"),
        ({"init": torch.zeros(3, 5)}, r"\(3, 5\).*\(4, 5\)"),
        ({"init": torch.full((4, 5), float("nan"))}, "finite"),
        ({"init": torch.zeros(4, 5), "restarts": 2}, "restarts=2"),
        ({"features": torch.zeros(20)}, r"\(20,\)"),
        ({"features": torch.zeros(20, 5).long()}, "int64"),
        ({"row_ids": torch.arange(19)}, r"\(19,\).*20 rows"),
        ({"row_ids": torch.arange(20) % 19}, "row_ids: 1 of .* from 0 to 19 once"),
        ({"row_ids": torch.arange(20) + 1}, "row_ids: 1 of .* from 0 to 19 once"),
        ({"row_ids": torch.arange(20) - 2}, "row_ids: 2 of .* from 0 to 19 once"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    arguments = {"features": sample(20), "num_clusters": 4, **options}
    with pytest.raises(ValueError, match=message):
        kmeans(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_rows_that_are_not_finite(value: float) -> None:
    x = sample(600)
    x[3, 1] = x[3, 2] = x[599, 0] = value
    with pytest.raises(ValueError, match="2 rows"):
        kmeans(x, 4)


ROWS, SAMPLE = 3000, 700


@pytest.fixture(scope="module")
def x() -> Tensor:
    """(3000, 16) unit rows around thirty directions."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 16, generator=generator)
    return F.normalize(
        centres[torch.arange(ROWS) % 30] + 0.5 * torch.randn(ROWS, 16, generator=generator), dim=1
    )


@pytest.mark.parametrize("count", [ROWS, 10 * ROWS])
@pytest.mark.parametrize("restarts", [1, 2])
def test_a_sample_of_all_rows_changes_no_bit(x: Tensor, count: int, restarts: int) -> None:
    found = e_steps.steps(x, sample=count, sample_seed=5, restarts=restarts)
    e_steps.same(found, e_steps.steps(x, restarts=restarts))


def test_means_are_those_of_the_drawn_rows(x: Tensor) -> None:
    drawn = rows_of(x, None, False).drawn(SAMPLE, 7)
    alone = kmeans(drawn.features, 40, iterations=5, restarts=2)
    found = kmeans(x, 40, iterations=5, restarts=2, sample=SAMPLE, sample_seed=7)
    assert torch.equal(found.means, alone.means)
    assert found.iterations == alone.iterations
    assert torch.equal(found.assignments, assign(x, found.means))
    assert torch.equal(found.distances, distances_to(x, found.means, found.assignments))
    assert found.objective == pytest.approx(float(found.distances.double().square().mean()))
    assert found.objective > 1.001 * alone.objective
    whole = kmeans(x, 40, iterations=5, restarts=2)
    assert whole.objective < found.objective < 1.1 * whole.objective


def test_what_is_said_is_said_of_all_rows(x: Tensor) -> None:
    for g in e_steps.steps(x, sample=SAMPLE, sample_seed=3):
        counts = torch.bincount(g.assignments, minlength=len(g.means))
        assert len(g.assignments) == counts.sum() == ROWS
        distances = distances_to(x, g.means, g.assignments)
        phi = cluster_concentration(distances, g.assignments, len(g.means), 0.2)
        torch.testing.assert_close(g.concentration, phi, rtol=1e-6, atol=0)
        assert g.objective == pytest.approx(float(distances.double().square().mean()))


def test_draw() -> None:
    """Distinct rows in their order, others for another seed, each about as often as any other."""
    rows = rows_of(torch.arange(100.0).view(100, 1), None, False)
    draws = [rows.drawn(30, seed) for seed in range(200)]
    taken = torch.stack([d.features[:, 0].long() for d in draws])
    assert (taken.diff(dim=1) > 0).all()
    assert len({tuple(t.tolist()) for t in taken}) == 200
    often = torch.bincount(taken.view(-1), minlength=100)
    assert often.min() > 30
    assert often.max() < 95
    assert torch.equal(rows.drawn(30, 4).features, draws[4].features)
    assert all(torch.equal(d.ids, torch.arange(30)) for d in draws)
    assert rows.drawn(100, 0) is rows


def test_faiss_sees_the_sample(x: Tensor) -> None:
    pytest.importorskip("faiss")
    options: dict[str, Any] = {"iterations": 4, "sample": SAMPLE, "backend": "faiss"}
    found = kmeans(x, 40, **options)
    ours = kmeans(x, 40, **{**options, "backend": "torch"}, precision="highest")
    torch.testing.assert_close(found.means, ours.means, rtol=0, atol=1e-5)
