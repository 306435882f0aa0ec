"""Two processes of which one is slow or fails: the other waits, or ends with it."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.clustering import Clustering, backends, kmeans
from solo_ext.core.distributed import on_first, propagate_rank_errors, rank_barrier

pytestmark = pytest.mark.slow

InProcesses = Callable[[Any], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("distributed_ranks")
sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(in_processes: InProcesses) -> list[dict[str, Any]]:
    """What each of the two processes met with."""
    return in_processes(ranks)


def test_work_of_the_first_rank_may_outlast_the_timeout(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        seconds, found = result["slow alone"]
        assert seconds > ranks.TIMEOUT
        assert found == (7 if rank == 0 else None)


def test_faiss_may_outlast_the_timeout(results: list[dict[str, Any]]) -> None:
    pytest.importorskip("faiss")
    alone = kmeans(ranks.features(), ranks.CLUSTERS, iterations=4, backend="faiss")
    for result in results:
        found = Clustering(*result["slow faiss"])
        torch.testing.assert_close(found.means, alone.means, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("slow passes", {}), ("after", {}), ("sample", {"sample": 90, "sample_seed": 4})],
)
def test_passes_may_outlast_it_together(
    results: list[dict[str, Any]], name: str, options: dict[str, int]
) -> None:
    """And what one process finds is found, also after errors, also of a sample."""
    alone = kmeans(ranks.features(), ranks.CLUSTERS, iterations=4, **options)
    assert alone.iterations == 4
    for rank, result in enumerate(results):
        found, ids = Clustering(*result[name]), ranks.share(rank)[1]
        assert torch.equal(found.means, alone.means)
        assert torch.equal(found.assignments, alone.assignments[ids])


FAILURES = {
    "first pass": (1, "OutOfMemoryError", "of 9 GiB"),
    "later pass": (0, "OutOfMemoryError", "of 8 GiB"),
    "sums": (1, "OutOfMemoryError", "of 7 GiB"),
    "faiss": (0, "RuntimeError", "Error in faiss"),
    "embedding": (1, "UserError", "image 'a.png' cannot be read"),
    "end": (0, "OSError", "no space left on device"),
}


@pytest.mark.fault
@pytest.mark.parametrize("case", FAILURES)
def test_an_error_ends_both_at_once(results: list[dict[str, Any]], case: str) -> None:
    if case == "faiss":
        pytest.importorskip("faiss")
    failing, kind, text = FAILURES[case]
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


def test_faiss_lets_other_threads_go_on() -> None:
    """Else no thread could say that this rank is alive."""
    pytest.importorskip("faiss")
    x = torch.randn(60_000, 32, generator=torch.Generator().manual_seed(0))
    kmeans(x[:100], 2, iterations=1, backend="faiss")
    done = threading.Event()

    def work() -> None:
        backends._by_faiss(x, x[:300], 20)
        done.set()

    thread = threading.Thread(target=work)
    longest, last = 0.0, time.monotonic()
    begin = last
    thread.start()
    while not done.wait(0.005):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < 0.5 * (time.monotonic() - begin)
