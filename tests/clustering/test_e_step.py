"""The concentrations against a loop over clusters; ``tests/losses/test_vectors.py`` has vectors."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from solo_ext.clustering import cluster_concentration


def flat(members: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and assignments of clusters given as lists, rows shuffled."""
    distances = torch.tensor([d for own in members for d in own], dtype=torch.float64)
    clusters = torch.tensor([c for c, own in enumerate(members) for _ in own], dtype=torch.int64)
    order = torch.randperm(len(distances), generator=torch.Generator().manual_seed(0))
    return distances[order], clusters[order]


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def by_loop(members: list[list[float]], temperature: float, alpha: float) -> list[float]:
    """The formula, cluster by cluster."""
    raw = [sum(m) / len(m) / math.log(len(m) + alpha) if len(m) > 1 else None for m in members]
    largest = max((r for r in raw if r is not None), default=0.0)
    filled = [largest if r is None else r for r in raw]
    low, high = percentile(filled, 0.1), percentile(filled, 0.9)
    clipped = [min(max(value, low), high) for value in filled]
    mean = sum(clipped) / len(clipped)
    if mean == 0:
        return [temperature] * len(members)
    return [max(temperature * c / mean, temperature / 100) for c in clipped]


MEMBERS = st.lists(
    st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.5]) | st.floats(0, 2), max_size=14),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(MEMBERS, st.floats(0.01, 2), st.sampled_from([0.0, 1.0, 10.0]))
@example([[0.0, 0.0], [0.0, 0.0, 0.0], []], 0.3, 10.0)
@example([[], []], 0.3, 10.0)
@example([[1.0]], 0.3, 10.0)
# The one spread-out cluster is above the 90th percentile of zeros.
@example([[0.0, 0.0]] * 30 + [[1.0, 2.0]], 0.3, 10.0)
# Copies of one image get the floor.
@example([[0.0, 0.0]] * 4 + [[1.0, 1.0]] * 6, 0.2, 10.0)
def test_equals_the_loop(members: list[list[float]], temperature: float, alpha: float) -> None:
    found = cluster_concentration(*flat(members), len(members), temperature, alpha)
    assert found.tolist() == pytest.approx(by_loop(members, temperature, alpha), rel=1e-9)


def test_computes_in_fp64() -> None:
    distances, clusters = flat([[0.1 + 1e-4 * k for k in range(50_000)], [0.2, 0.3], [0.7, 0.1]])
    exact = cluster_concentration(distances, clusters, 3, 0.2)
    single = cluster_concentration(distances.float(), clusters, 3, 0.2)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.rand(3), torch.zeros(2).long(), 2, 0.2), r"\(3,\) and \(2,\)"),
        ((torch.rand(2), torch.tensor([0, 1]), 0, 0.2), "num_clusters=0"),
        ((torch.rand(2), torch.tensor([0, 1]), 2, 0.0), "temperature=0.0"),
        ((torch.rand(2), torch.tensor([0, 1]), 2, 0.2, -1.0), "alpha=-1.0"),
    ],
)
def test_refuses(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_concentration(*arguments)  # type: ignore[arg-type]
