"""Two processes of which one is slow or fails: the other waits, or ends with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from solo_ext.clustering import Clustering, kmeans
from solo_ext.core.distributed import propagate_rank_errors, rank_barrier
from solo_ext.lab.evaluation.online import on_first
from tests.core import distributed_ranks as ranks

pytestmark = pytest.mark.slow

InProcesses = Callable[[Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(in_processes: InProcesses) -> list[dict[str, Any]]:
    """What each of the two processes met with."""
    return in_processes(ranks)


def test_work_of_the_first_rank_may_outlast_the_timeout(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        seconds, found = result["slow alone"]
        assert seconds > ranks.TIMEOUT
        assert found == (7 if rank == 0 else None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slow passes", {"iterations": ranks.SLOW}),
        ("after", {}),
        ("sample", {"sample": 90, "sample_seed": 4}),
    ],
)
def test_passes_may_outlast_it_together(
    results: list[dict[str, Any]], name: str, options: dict[str, int]
) -> None:
    """And what one process finds is found, also after errors, also of a sample."""
    given = {"iterations": 4, **options}
    alone = kmeans(ranks.features(), ranks.CLUSTERS, **given)
    assert alone.iterations == given["iterations"]
    for rank, result in enumerate(results):
        found, ids = Clustering(*result[name]), ranks.share(rank)[1]
        assert torch.equal(found.means, alone.means)
        assert torch.equal(found.assignments, alone.assignments[ids])


@pytest.mark.fault
@pytest.mark.parametrize("case", ranks.FAILURES)
def test_an_error_ends_both_at_once(results: list[dict[str, Any]], case: str) -> None:
    failing, error = ranks.FAILURES[case]
    kind, text = type(error).__name__, str(error)
    for rank, result in enumerate(results):
        name, message, seconds = result["failures"][case]
        if rank == failing:
            assert (name, message) == (kind, text)
        elif kind == "UserError":
            assert (name, message) == (kind, f"rank {failing}: {text}")
        else:
            assert (name, message) == ("RankError", f"rank {failing}: {kind}: {text}")
        assert seconds < ranks.PATIENT / 3


def test_one_process_needs_no_meeting() -> None:
    cpu = torch.device("cpu")
    rank_barrier(cpu)
    with pytest.raises(KeyError, match="own"), propagate_rank_errors(cpu):
        raise KeyError("own")
    assert on_first(torch.is_grad_enabled, cpu)
