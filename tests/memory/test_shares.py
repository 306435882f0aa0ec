"""Tables by sample index, shared out to two and four gloo processes, equal those of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank
from solo_ext.methods import e_step
from tests.memory import share_ranks as ranks

InProcesses = Callable[[Any, int], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes found."""
    return in_processes(ranks, request.param)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_no_rank_holds_all(results: list[dict[str, Any]]) -> None:
    counts = [result["rows"] for result in results]
    assert sum(counts) == ranks.SAMPLES
    assert max(counts) == -(-ranks.SAMPLES // len(results))


def test_clusters_of_a_batch(results: list[dict[str, Any]]) -> None:
    whole = ranks.drawn().long()
    for number, batch in enumerate(ranks.BATCHES):
        part = len(batch) // len(results)
        for rank, result in enumerate(results):
            samples = batch[rank * part : (rank + 1) * part]
            assert torch.equal(result["of"][number], whole[:, samples])


def test_bank(results: list[dict[str, Any]]) -> None:
    """After every batch, of which one brings rows to a single rank."""
    value, filled = torch.zeros(ranks.SAMPLES, ranks.D), torch.zeros(ranks.SAMPLES).bool()
    for number, batch in enumerate(ranks.BATCHES):
        for sample, row in zip(batch, ranks.rows(number), strict=True):
            value[sample], filled[sample] = row, True
        joined = results[0]["banks"][number]
        assert torch.equal(joined["value"], value)
        assert torch.equal(joined["filled"], filled)
    assert 0 < filled.sum() < ranks.SAMPLES


def test_checkpoints_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    alone = ranks.everything()
    same(results[0]["state"], alone["state"])
    same(results[0]["continued"]["state"], alone["state"])
    for result in results:
        same(result["empty"], alone["empty"])
        assert torch.equal(result["match"], alone["match"])
        assert result["information"] == alone["information"]


def test_processes_go_on_from_another_number_of_them(results: list[dict[str, Any]]) -> None:
    whole, batch = ranks.drawn().long(), ranks.BATCHES[1]
    for rank, result in enumerate(results):
        part = len(batch) // len(results)
        samples = batch[rank * part : (rank + 1) * part]
        assert torch.equal(result["continued"]["of"], whole[:, samples])
        assert result["continued"]["epoch"] == 3


def test_information_of_many_images_is_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters, labels = ranks.drawn()
    monkeypatch.setattr(e_step, "LARGE", 8)
    found = e_step._mutual_information(clusters, labels)
    assert found == normalized_mutual_info_score(labels[::3], clusters[::3])


def test_no_look_up_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 1 of 4."""

    def gathered(x: Tensor) -> Tensor:
        return torch.cat([x] * 4)

    for name, value in (
        ("world_size", lambda: 4),
        ("rank", lambda: 1),
        ("gather", gathered),
        ("sum_over_ranks", lambda x: x),
    ):
        monkeypatch.setattr(distributed, name, value)
    state, bank = ClusterPrototypes([5, 7], 8), FeatureBank(8)
    bank.resize_(1001)
    assert len(bank.value) == 250
    state.assignments = torch.empty(2, 250, dtype=torch.int32)
    for held in (state, bank):
        held.to("meta")
    samples = torch.empty(6, dtype=torch.long, device="meta")
    # On meta tensors, what waits raises.
    assert state.assignments_of(samples).shape == (2, 6)
    bank.update_(gathered(samples), torch.empty(24, 8, device="meta"))
