"""The support set: what its rows are of, and what is found in it."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from solo_ext.memory.features import SupportSet
from solo_ext.memory.state import keep_out_of_broadcast


def unit(count: int, dim: int = 4, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def filled(size: int = 6) -> SupportSet:
    support = SupportSet(size, 4)
    support.update_(unit(size), torch.arange(size) + 10, torch.arange(size) % 2)
    return support


@pytest.mark.parametrize("sizes", [[1] * 9, [3, 3, 3], [4, 4, 4], [2, 0, 5, 1, 4], [5, 5], [12]])
def test_writes_all_three_alike_in_a_ring(sizes: list[int]) -> None:
    support, size = SupportSet(5, 1), 5
    assert support.indices.tolist() == support.labels.tolist() == [-1] * size
    held = [support.value, support.indices, support.labels]
    expected, number = [-1] * size, 0
    for count in sizes:
        ids = torch.arange(number, number + count)
        support.update_(ids.float().unsqueeze(1), ids, ids * 2)
        for value in ids.tolist():
            expected[value % size] = value
        number += count
        written = [i for i, value in enumerate(expected) if value >= 0]
        assert support.indices.tolist() == expected
        assert support.labels[written].tolist() == [2 * expected[i] for i in written]
        assert support.value[written, 0].tolist() == [expected[i] for i in written]
        assert support.pointer == number % size
    assert (support.written, support.updates) == (number, len(sizes))
    assert held[0] is support.value
    assert held[1] is support.indices
    assert held[2] is support.labels
    assert support.indices.dtype == support.labels.dtype == torch.int64


def test_rows_of_nothing_known_lose_what_stood_there() -> None:
    support = filled(3)
    support.update_(unit(2, seed=1))
    assert support.indices.tolist() == [-1, -1, 12]
    assert support.labels.tolist() == [-1, -1, 0]


def test_update_allocates_nothing() -> None:
    support, keys, ids = SupportSet(4096, 4), unit(300), torch.arange(300)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        for _ in range(20):
            support.update_(keys, ids, ids)
    events: list = trace.profiler.kineto_results.events()  # type: ignore[type-arg, union-attr]
    assert not [e for e in events if e.name() == "[memory]"]


@pytest.mark.parametrize("k", [1, 3])
def test_finds_rows_with_their_labels(k: int) -> None:
    support, query = filled(), unit(5, seed=3)
    expected = (query @ support.value.T).topk(k, dim=1)
    found = support.nearest(query, k)
    assert torch.equal(found.index, expected.indices)
    torch.testing.assert_close(found.similarity, expected.values)
    assert found.embeddings.shape == (5, k, 4)
    assert torch.equal(found.embeddings, support.value[expected.indices])
    assert torch.equal(found.labels, support.labels[expected.indices])


def test_leaves_out_the_own_image() -> None:
    support = filled()
    query, ids = support.value.clone(), support.indices.clone()
    assert support.nearest(query).index.squeeze(1).tolist() == list(range(6))
    found = support.nearest(query, 5, ids)
    similarity = (query @ query.T).fill_diagonal_(float("-inf"))
    assert torch.equal(found.index, similarity.topk(5, dim=1).indices)
    assert found.similarity.isfinite().all()


def test_what_was_found_outlives_the_next_update() -> None:
    support, query = filled(), unit(2, seed=3).requires_grad_()
    found = support.nearest(query, 2)
    before = [part.clone() for part in found]
    support.update_(torch.zeros(6, 4), torch.zeros(6, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert not any(part.requires_grad for part in found)


def test_goes_on_after_a_checkpoint() -> None:
    support, other, file = SupportSet(5, 4), SupportSet(5, 4), io.BytesIO()
    support.update_(unit(3), torch.arange(3), torch.arange(3))
    torch.save(support.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for one in (support, other):
        one.update_(unit(3, seed=1), torch.arange(3, 6), torch.arange(3, 6))
    assert other.indices.tolist() == [5, 1, 2, 3, 4]
    assert torch.equal(other.value, support.value)
    assert torch.equal(other.labels, support.labels)
    assert other.extra_state() == support.extra_state() == [1, 6, 2]


def test_is_kept_out_of_broadcast() -> None:
    root = torch.nn.ModuleDict({"support": SupportSet(4, 2)})
    keep_out_of_broadcast(root)
    names = {"support.value", "support.indices", "support.labels"}
    assert set(root._ddp_params_and_buffers_to_ignore) == names  # type: ignore[arg-type]


def test_runs_without_looking_at_values() -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    support = SupportSet(5, 4).to("meta")
    keys, ids = torch.empty(3, 4, device="meta"), torch.empty(3, dtype=torch.long, device="meta")
    for _ in range(2):
        found = support.nearest(keys, 2, ids)
        support.update_(keys, ids, ids)
    assert found.embeddings.shape == (3, 2, 4)
    assert support.pointer == 1


def test_refuses() -> None:
    support = filled()
    with pytest.raises(ValueError, match=r"indices must be \(2,\).*\(3,\)"):
        support.update_(unit(2), torch.arange(3))
    with pytest.raises(ValueError, match=r"labels must be \(2,\).*\(1,\)"):
        support.update_(unit(2), torch.arange(2), torch.arange(1))
    assert support.updates == 1, "nothing may move"
    with pytest.raises(ValueError, match=r"k=7: must lie in \[1, 6\]"):
        support.nearest(unit(2), 7)
