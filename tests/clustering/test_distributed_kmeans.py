"""Two gloo processes find the same means, bit by bit, as one with all rows."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.clustering import Clustering, kmeans
from solo_ext.clustering.mutual_information import normalized_mutual_information
from solo_ext.clustering.rows import rows_of

InProcesses = Callable[[Any], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
shards: Any = importlib.import_module("shards")
sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(in_processes: InProcesses) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return in_processes(shards)


def check(results: list[dict[str, Any]], name: str, deal: str, alone: Clustering) -> None:
    """Both ranks have the means of one process and their own rows' assignments."""
    for rank, result in enumerate(results):
        found = Clustering(*result[name])
        ids = shards.share(deal, rank)
        assert torch.equal(found.means, alone.means)
        assert torch.equal(found.assignments, alone.assignments[ids])
        torch.testing.assert_close(found.distances, alone.distances[ids], rtol=0, atol=1e-6)
        assert found.objective == pytest.approx(alone.objective, rel=1e-7)
        assert found.iterations == alone.iterations


@pytest.mark.parametrize("start", shards.STARTS)
@pytest.mark.parametrize("deal", shards.DEALS)
def test_two_processes_equal_one(results: list[dict[str, Any]], deal: str, start: str) -> None:
    alone = kmeans(shards.features(), **shards.options(start))
    assert torch.bincount(alone.assignments, minlength=len(alone.means)).min() > 0
    check(results, f"{deal}, {start}", deal, alone)


def test_the_relocated_start_relocates() -> None:
    options = shards.options("relocated")
    found = kmeans(shards.features(), **options)
    plain = kmeans(shards.features(), **options, relocate=False)
    assert found.objective < plain.objective


def test_ranks_share_the_merge_costs(results: list[dict[str, Any]]) -> None:
    """Tile by tile in turn: every product is one rank's."""
    costs, partners, alone = shards.merged(rows_of(shards.features(), None, False))
    assert alone == shards.MERGED
    for result in results:
        assert torch.equal(result["merged"][0], costs)
        assert torch.equal(result["merged"][1], partners)
    first, second = (result["merged"][2] for result in results)
    assert first + second == alone
    assert 0 < second < first < alone


def test_ranks_share_the_mutual_information(results: list[dict[str, Any]]) -> None:
    alone = normalized_mutual_information(*shards.labelled())
    assert 0.1 < alone < 0.9
    for result in results:
        assert result["labelled"] == pytest.approx(alone, abs=1e-12)


def test_ranks_number_their_rows_in_order(results: list[dict[str, Any]]) -> None:
    alone = kmeans(shards.features(), shards.CLUSTERS, iterations=6)
    check(results, "no ids", "in order", alone)


def test_without_sharding_a_rank_is_alone(results: list[dict[str, Any]]) -> None:
    alone = kmeans(shards.features(), shards.CLUSTERS, iterations=6)
    for result in results:
        assert torch.equal(Clustering(*result["alone"]).means, alone.means)


def test_the_first_rank_says_where_to_start(results: list[dict[str, Any]]) -> None:
    x = shards.features()
    alone = kmeans(x, shards.CLUSTERS, init=x[: shards.CLUSTERS], iterations=6)
    check(results, "own init", "in order", alone)


def test_all_ranks_refuse_alike(results: list[dict[str, Any]]) -> None:
    first, second = (result["refusals"] for result in results)
    assert first == second
    assert "3 rows hold NaN" in first["nan"]
    assert "num_clusters=901: there are only 900 rows" in first["too many"]
    assert "283 are missing and 283 occur more than once" in first["ids"]


def test_faiss_on_the_first_rank(results: list[dict[str, Any]]) -> None:
    pytest.importorskip("faiss")
    alone = kmeans(shards.features(), shards.CLUSTERS, iterations=6, backend="faiss")
    for rank, result in enumerate(results):
        found = Clustering(*result["faiss"])
        torch.testing.assert_close(found.means, alone.means, rtol=0, atol=1e-5)
        ids = shards.share("shuffled", rank)
        assert torch.equal(found.assignments, alone.assignments[ids])
