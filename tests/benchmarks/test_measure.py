"""Timing in turns, and counting what a step asks of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.counting import counted, forms_of_a_gpu
from benchmarks.measure import by_clock, peak_bytes, ratio, summary, take_turns
from solo_ext.kernels.nearest_rows import nearest_rows


def test_each_round_has_all_and_starts_with_another() -> None:
    calls: list[str] = []

    def timer(work: object, repeats: int) -> float:
        assert callable(work)
        work()
        return 1.0

    works = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = take_turns(works, rounds=3, warm=1, timer=timer)
    assert calls == list("cab" + "abc" + "bca" + "cab")
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_short_work_is_repeated() -> None:
    repeated: list[int] = []

    def timer(work: object, repeats: int) -> float:
        repeated.append(repeats)
        return 1e-3

    take_turns({"a": lambda: None}, rounds=1, warm=2, timer=timer)
    assert repeated == [1, 20, 20]


def test_ratios_are_of_the_same_round() -> None:
    # The second round was disturbed, which a ratio of medians would not show as 2.
    seconds = {"a": [1.0, 10.0, 1.2], "b": [2.0, 20.0, 2.4]}
    assert ratio(seconds, "b", "a") == 2.0


def test_summary_is_beside_the_first() -> None:
    works = {"a": lambda: sum(range(1000)), "b": lambda: sum(range(4000))}
    found = summary(take_turns(works, 3, 1, by_clock()), "a")
    assert found["a"]["ratio"] == 1
    assert found["b"]["ratio"] > 1  # type: ignore[operator]
    assert set(found["b"]) == {"ms", "ratio"}


def test_memory_is_the_peak() -> None:
    def work() -> torch.Tensor:
        first = torch.ones(2**18)
        del first
        return torch.ones(2**18) + torch.ones(2**18)

    # Three tensors of 1 MiB at the most, however many there were in all.
    assert peak_bytes(work) == pytest.approx(3 * 2**20, rel=0.03)


def test_what_the_host_waits_for() -> None:
    x = torch.arange(6.0)
    for work, expected in (
        (lambda: x.sum().item(), 1),
        (lambda: x[x > 2], 1),
        (lambda: x.masked_select(x > 2), 1),
        (lambda: (x > 2).nonzero(), 1),
        (lambda: bool((x > 2).any()), 1),
        (lambda: torch.where(x > 2, x, 0.0).sum(), 0),
        (lambda: x[torch.tensor([0, 1])], 0),
        (lambda: x.tolist(), 1),
        (lambda: x.cpu(), 1),
        (lambda: x.numpy(), 1),
        (lambda: np.asarray(x), 1),
        (lambda: x.to("cpu"), 1),
        (lambda: x.to(device="cpu"), 1),
        (lambda: x.cpu().tolist(), 2),
        # On a CPU nobody can say whether it is another one.
        (lambda: x.to(x.device), 0),
        (lambda: x.to(torch.float64), 0),
        (lambda: torch.bincount(x.long()), 1),
        (lambda: torch.repeat_interleave(x, x.long()), 1),
        (lambda: torch.repeat_interleave(x, x.long(), output_size=15), 0),
        (lambda: torch.repeat_interleave(x, 2), 0),
    ):
        assert len(counted(work).waits) == expected  # type: ignore[arg-type]
    assert not {"tolist", "cpu", "numpy", "to"} & set(vars(torch.Tensor))
    assert counted(lambda: x.max().item()).waits == ["aten::_local_scalar_dense"]


def test_copies_from_the_host_are_counted() -> None:
    x = torch.ones(3)
    for work, expected in (
        (lambda: torch.tensor([1.0, 2.0]) + 1, 1),
        (lambda: torch.as_tensor(3.0, device=x.device), 1),
        (lambda: x.to("meta"), 1),
        (lambda: torch.empty(3, device="meta").copy_(x), 1),
        (lambda: torch.arange(3) + x.to(torch.float64).clone().copy_(x), 0),
    ):
        assert len(counted(work).copies) == expected


def test_views_are_not_launched() -> None:
    x = torch.ones(4, 4)
    assert counted(lambda: x.T[0].detach()).launches == 0
    assert counted(lambda: (x + 1) @ x).launches == 2


def test_forms_of_a_gpu_are_counted_without_one() -> None:
    """A kernel counts as what it starts; what waits for a value raises."""
    query, table = (torch.empty(n, 32, device="meta") for n in (512, 98304))
    with forms_of_a_gpu():
        assert counted(lambda: nearest_rows(query, table)).launches == 4
        with pytest.raises(RuntimeError, match="meta"):
            counted(lambda: query.sum().item())
    assert counted(lambda: nearest_rows(query, table)).launches > 4
