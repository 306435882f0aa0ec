"""Queue, bank and support set: what they hold, what is found, what checkpoints bring back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank, FeatureQueue, SupportSet
from tests.memory.conftest import through_a_file


def test_loads_clusters_of_an_earlier_checkpoint() -> None:
    """In these they were int64; looked up they still are."""
    held = ClusterPrototypes([3, 2], 4)
    found = torch.tensor([[2, 0, 1], [1, 1, 0]])
    state = held.state_dict() | {"assignments": found}
    held.load_state_dict(state)
    assert held.assignments.dtype == torch.int32
    assert held.state_dict()["assignments"].tolist() == found.tolist()
    looked_up = held.assignments_of(torch.tensor([2, 2, 0]))
    assert looked_up.dtype == torch.int64
    assert looked_up.tolist() == [[1, 1, 2], [0, 0, 1]]


def rows(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def test_queue_starts_as_random_directions() -> None:
    queue = FeatureQueue(50, 8)
    torch.testing.assert_close(queue.value.norm(dim=1), torch.ones(50))
    assert queue.value.T.cov().diagonal().min() > 0.05


def test_queue_writes_in_place() -> None:
    queue = FeatureQueue(4, 2)
    held = queue.value
    for _ in range(2):
        queue.update_(torch.ones(3, 2, requires_grad=True))
    assert queue.value is held
    assert not queue.value.requires_grad


@pytest.mark.parametrize(
    ("size", "batch", "updates", "filled", "age"),
    [
        (5, 1, 0, 0.0, 0.0),
        (5, 2, 1, 0.4, 0.0),
        (5, 2, 2, 0.8, 0.5),
        (6, 2, 7, 1.0, 1.0),
        (5, 2, 4, 1.0, (0 + 0 + 1 + 1 + 2) / 5),
        (5, 7, 3, 1.0, 0.0),
        (8, 3, 5, 1.0, (3 * 0 + 3 * 1 + 2 * 2) / 8),
    ],
)
def test_queue_knows_how_much_it_holds_and_how_old(
    size: int, batch: int, updates: int, filled: float, age: float
) -> None:
    queue = FeatureQueue(size, 1)
    for _ in range(updates):
        queue.update_(torch.zeros(batch, 1))
    assert (queue.written, queue.updates) == (batch * updates, updates)
    assert queue.filled == pytest.approx(filled)
    assert queue.age == pytest.approx(age)
    numbers = (queue.pointer, queue.written, queue.updates, queue.filled, queue.age)
    assert not any(isinstance(number, Tensor) for number in numbers)


def test_queue_counts_go_through_a_checkpoint() -> None:
    queue, other = FeatureQueue(5, 1), FeatureQueue(5, 1)
    for _ in range(4):
        queue.update_(rows(1, 2))
    other.load_state_dict(through_a_file(queue))
    assert (other.pointer, other.written, other.updates) == (3, 8, 4)
    assert other.age == queue.age > 0


def test_bank_is_keyed_by_sample() -> None:
    bank = FeatureBank(2)
    bank.resize_(5)
    features = F.normalize(torch.randn(3, 2), dim=1)
    bank.update_(torch.tensor([4, 0, 2]), features)
    assert bank.filled.tolist() == [True, False, True, False, True]
    assert torch.equal(bank.value[[4, 0, 2]], features)
    bank.update_(torch.tensor([0]), features[:1])
    assert torch.equal(bank.value[0], features[0])
    assert (bank.value[[1, 3]] == 0).all()
    other = FeatureBank(2)
    other.load_state_dict(through_a_file(bank))
    assert torch.equal(other.value, bank.value)
    assert torch.equal(other.filled, bank.filled)


def test_prototypes_go_through_a_checkpoint() -> None:
    held = ClusterPrototypes([3, 2, 3], 4)
    assert held.names == ["3", "2", "3_2"]
    means = [torch.randn(k, 4) for k in (3, 2, 3)]
    concentration = [torch.rand(k) for k in (3, 2, 3)]
    assignments = torch.randint(0, 2, (3, 6))
    held.update_(7, means, concentration, [*assignments])
    other = ClusterPrototypes([3, 2, 3], 4)
    assert other.epoch == -1
    other.load_state_dict(through_a_file(held))
    assert other.epoch == 7
    assert torch.equal(other.assignments, assignments)
    unit = [F.normalize(m, dim=1) for m in means]
    for found, expected in zip(
        [*other.means, *other.prototypes, *other.concentration],
        [*means, *unit, *concentration],
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_scaled_prototypes_are_those_of_the_last_e_step() -> None:
    held, other = ClusterPrototypes([3, 2], 4), ClusterPrototypes([3, 2], 4)
    for epoch in range(2):
        phi = [0.1 + torch.rand(k) for k in (3, 2)]
        means = [torch.randn(k, 4) for k in (3, 2)]
        held.update_(epoch, means, phi, [torch.zeros(5).long()] * 2)
        other.load_state_dict(held.state_dict())
        for state in (held, other):
            first = state.scaled()
            assert state.scaled() is first
            for m in range(2):
                expected = F.normalize(means[m], dim=1) / phi[m].unsqueeze(1)
                torch.testing.assert_close(first[m], expected)
                assert torch.equal(state.scaled(torch.bfloat16)[m], first[m].bfloat16())
    # The concentrations of half precision are divided by in fp32, as the loss does.
    held.bfloat16()
    for table, c, phi in zip(held.scaled(), held.prototypes, held.concentration, strict=True):
        assert torch.equal(table, c.float() * (1 / phi.float()).unsqueeze(1))
    assert not [name for name in held.state_dict() if "scaled" in name]


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


def test_update_allocates_nothing() -> None:
    support, keys, ids = SupportSet(4096, 4), unit(300), torch.arange(300)
    assert peak_bytes(lambda: [support.update_(keys, ids, ids) for _ in range(20)]) == 0
