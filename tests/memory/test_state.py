"""Queue, bank and prototypes: what they hold, and that checkpoints bring it back."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.memory.features import FeatureBank, FeatureQueue
from solo_ext.memory.prototypes import ClusterPrototypes
from solo_ext.memory.state import State, keep_out_of_broadcast


def rows(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def through_a_file(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("sizes", [[1] * 9, [3, 3, 3], [4, 4, 4], [2, 5, 1, 4], [5, 5], [7], [12]])
def test_queue_keeps_the_last_rows_in_a_ring(sizes: list[int]) -> None:
    queue, size = FeatureQueue(5, 1), 5
    expected: list[float] = queue.value.squeeze(1).tolist()
    place = number = 0
    for count in sizes:
        numbers = list(range(number, number + count))
        queue.update_(rows(*numbers))
        for value in numbers:
            expected[place % size] = value
            place += 1
        number += count
        assert queue.value.squeeze(1).tolist() == expected
        assert queue.pointer == place % size


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


def test_queue_goes_on_after_a_checkpoint() -> None:
    queue, other = FeatureQueue(5, 1), FeatureQueue(5, 1)
    queue.update_(rows(1, 2, 3))
    other.load_state_dict(through_a_file(queue))
    for one in (queue, other):
        one.update_(rows(4, 5, 6))
    assert other.value.squeeze(1).tolist() == [6, 2, 3, 4, 5]
    assert other.pointer == queue.pointer == 1


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


def test_queue_of_uneven_batches_has_the_age_of_equal_ones() -> None:
    queue, even = FeatureQueue(20, 1), FeatureQueue(20, 1)
    for uneven, size in ((0, 3), (5, 3), (4, 3)):
        queue.update_(torch.zeros(uneven, 1))
        even.update_(torch.zeros(size, 1))
    assert (queue.written, queue.updates) == (even.written, even.updates) == (9, 3)
    assert queue.age == even.age == 1.0
    empty = FeatureQueue(20, 1)
    empty.update_(torch.zeros(0, 1))
    assert (empty.updates, empty.filled, empty.age) == (1, 0.0, 0.0)


def test_queue_counts_go_through_a_checkpoint() -> None:
    queue, other = FeatureQueue(5, 1), FeatureQueue(5, 1)
    for _ in range(4):
        queue.update_(rows(1, 2))
    other.load_state_dict(through_a_file(queue))
    assert (other.pointer, other.written, other.updates) == (3, 8, 4)
    assert other.age == queue.age > 0


def test_queue_takes_checkpoints_that_hold_the_pointer_alone() -> None:
    queue = FeatureQueue(5, 1)
    queue.update_(rows(1, 2))
    state = queue.state_dict() | {"_extra_state": torch.tensor([3])}
    queue.load_state_dict(state)
    assert (queue.pointer, queue.written, queue.updates) == (3, 0, 0)
    assert queue.filled == queue.age == 0


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
    prototypes = [F.normalize(m, dim=1) for m in means]
    concentration = [torch.rand(k) for k in (3, 2, 3)]
    assignments = torch.randint(0, 2, (3, 6))
    held.update_(means, prototypes, concentration, assignments)
    held.epoch, held.backend = 7, "faiss"
    other = ClusterPrototypes([3, 2, 3], 4)
    assert (other.epoch, other.backend) == (-1, "")
    other.load_state_dict(through_a_file(held))
    assert (other.epoch, other.backend) == (7, "faiss")
    assert torch.equal(other.assignments, assignments)
    for name, given in (
        ("means", means),
        ("prototypes", prototypes),
        ("concentration", concentration),
    ):
        for found, expected in zip(getattr(other, name), given, strict=True):
            assert torch.equal(found, expected)


def test_wrong_number_of_prototypes_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        ClusterPrototypes([4], 4).load_state_dict(ClusterPrototypes([3], 4).state_dict())


def test_state_is_kept_out_of_broadcast() -> None:
    class Method(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.queues = nn.ModuleList([FeatureQueue(4, 2)])
            self.bank = FeatureBank(2)

    method = Method()
    keep_out_of_broadcast(method)
    names = set(method._ddp_params_and_buffers_to_ignore)  # type: ignore[arg-type]
    assert names == {"queues.0.value", "bank.value", "bank.filled"}
    assert names < {name for name, _ in method.named_buffers()}


def test_state_needs_nothing_but_numbers() -> None:
    class Counter(State):
        count = 0

        def extra_state(self) -> list[int]:
            return [self.count]

        def set_numbers(self, numbers: list[int]) -> None:
            (self.count,) = numbers

    one, two = Counter(), Counter()
    one.count = 3
    two.load_state_dict(through_a_file(one))
    assert two.count == 3
