"""Two and four gloo processes find the same means, bit by bit, as one with all rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from solo_ext.clustering import Clustering, kmeans
from solo_ext.clustering.rows import rows_of
from tests.clustering import e_steps
from tests.clustering import kmeans_ranks as ranks

InProcesses = Callable[[Any, int], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes found."""
    return in_processes(ranks, request.param)


def check(results: list[dict[str, Any]], name: str, deal: str, alone: Clustering) -> None:
    """All ranks have the means of one process and their own rows' assignments."""
    for rank, result in enumerate(results):
        found = Clustering(*result[name])
        ids = ranks.share(deal, rank)
        assert torch.equal(found.means, alone.means)
        assert torch.equal(found.assignments, alone.assignments[ids])
        torch.testing.assert_close(found.distances, alone.distances[ids], rtol=0, atol=1e-6)
        assert found.objective == pytest.approx(alone.objective, rel=1e-7)
        assert found.iterations == alone.iterations


@pytest.mark.parametrize(("deal", "start"), ranks.PAIRS)
def test_processes_equal_one(results: list[dict[str, Any]], deal: str, start: str) -> None:
    alone = kmeans(ranks.features(), **ranks.options(start))
    assert torch.bincount(alone.assignments, minlength=len(alone.means)).min() > 0
    check(results, f"{deal}, {start}", deal, alone)


def test_the_relocated_start_relocates() -> None:
    options = ranks.options("relocated")
    found = kmeans(ranks.features(), **options)
    plain = kmeans(ranks.features(), **options, relocate=False)
    assert found.objective < plain.objective


def test_ranks_share_the_merge_costs(results: list[dict[str, Any]]) -> None:
    """Tile by tile in turn: every product is one rank's."""
    costs, partners, alone = ranks.merged(rows_of(ranks.features(), None, False))
    assert alone == ranks.MERGED
    for result in results:
        assert torch.equal(result["merged"][0], costs)
        assert torch.equal(result["merged"][1], partners)
    shares = [result["merged"][2] for result in results]
    assert sum(shares) == alone
    # Three tiles: the fourth process has none.
    assert shares[1] > 0
    assert max(shares) < alone


def test_ranks_number_their_rows_in_order(results: list[dict[str, Any]]) -> None:
    alone = kmeans(ranks.features(), ranks.CLUSTERS, iterations=6)
    check(results, "no ids", "in order", alone)


def test_the_first_rank_says_where_to_start(results: list[dict[str, Any]]) -> None:
    x = ranks.features()
    alone = kmeans(x, ranks.CLUSTERS, init=x[: ranks.CLUSTERS], iterations=6)
    check(results, "own init", "in order", alone)


def test_all_ranks_refuse_alike(results: list[dict[str, Any]]) -> None:
    first, *others = (result["refusals"] for result in results)
    assert all(other == first for other in others)
    assert "3 rows hold NaN" in first["nan"]
    assert "row_ids: some of one process are repeated on another" in first["doubled"]
    assert "num_clusters=901: there are 900 rows" in first["too many"]


def test_e_step_of_several_ranks_is_that_of_one(results: list[dict[str, Any]]) -> None:
    """To the last bit, cold and warm, with empty and single clusters, in memory or in files."""
    alone = ranks.steps(torch.arange(ranks.SAMPLES))
    for rank, result in enumerate(results):
        own = slice(rank, None, len(results))
        for found, expected in zip(result["steps"], alone, strict=True):
            e_steps.same([ranks.Granularity(*fields) for fields in found], expected, own)
    assert torch.equal(alone[0][2].sizes, torch.bincount(alone[0][2].assignments, minlength=300))
    assert (alone[0][2].sizes == 1).sum() > 200
