"""Which form of an operation runs, with a made clock in place of a GPU's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.counting import forms_of_a_gpu
from solo_ext.kernels import dispatch
from solo_ext.kernels.tables import table_logsumexp

GB = 2**30
Forms = dict[dispatch.Form, Callable[[Tensor], Tensor]]


class Clock:
    """CUDA's events, with the milliseconds that each form is said to take."""

    now = 0.0

    def __init__(self, **times: float) -> None:
        self.times, self.calls = times, []  # type: ignore[var-annotated]

    def forms(self, *failing: str) -> Forms:
        def form(name: str) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                self.calls.append(name)
                Clock.now += self.times[name]
                if name in failing:
                    raise RuntimeError(f"{name} needs a larger GPU")
                return x * 2

            return run

        return {name: form(name) for name in self.times}  # type: ignore[misc]


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture(autouse=True)
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_choices", {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """CPU tensors count as a GPU's, which has as much memory as the result says."""
    memory = {"free": 16 * GB, "total": 64 * GB}
    monkeypatch.setattr(dispatch, "_on_gpu", lambda x: True)
    for name, stand_in in {
        "get_device_name": lambda device: "GPU X",
        "mem_get_info": lambda device: (memory["free"], memory["total"]),
        "memory_reserved": lambda device: 3 * GB,
        "memory_allocated": lambda device: 2 * GB,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return memory


def rows(count: int = 4, learn: bool = True) -> Tensor:
    return torch.ones(count, 3, requires_grad=learn)


def test_sizes_decide_on_a_cpu() -> None:
    """Up to 512 KiB the plain form, and where another limit was measured up to that."""
    clock = Clock(plain=9, tiles=1)
    for operation, columns, dtype in (
        ("f", 512, torch.float32),
        ("f", 256, torch.float64),
        ("two_views", 16384, torch.float32),
        ("prototype_contrast", 64, torch.float32),
    ):
        x = torch.ones(2, 128, 3, dtype=dtype)
        dispatch.run(operation, clock.forms(), [x], columns)
        dispatch.run(operation, clock.forms(), [x], columns + 1)
    assert clock.calls == ["plain", "tiles"] * 4
    assert not dispatch.choices()


def test_the_fastest_runs_on_a_gpu_and_is_timed_once(
    gpu: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(plain=3, tiles=2, fused=1)
    with caplog.at_level(logging.INFO, "solo_ext"):
        found = dispatch.run("f", clock.forms(), [rows()], 5, "bf16")
    assert torch.equal(found, torch.full((4, 3), 2.0))
    assert clock.calls.count("plain") == clock.calls.count("tiles") == 7
    assert clock.calls.pop() == "fused"
    (line,) = caplog.messages
    assert line == (
        "f on GPU X: (4, 3), 5, torch.float32, bf16, gradients [True]: fused (plain 3.000 ms, "
        "tiles 2.000 ms, fused 1.000 ms)"
    )
    clock.calls.clear()
    dispatch.run("f", clock.forms(), [rows()], 5, "bf16")
    assert clock.calls == ["fused"], "once for each shape"
    for x, columns in ((rows(5), 5), (rows(), 6), (rows(learn=False), 5)):
        clock.calls.clear()
        dispatch.run("f", clock.forms(), [x], columns, "bf16")
        assert len(clock.calls) == 22


def test_timing_leaves_no_trace(gpu: dict[str, int]) -> None:
    """Neither gradients, nor a graph, nor other random numbers."""
    x, state = rows(), torch.get_rng_state()
    found = dispatch.run("f", Clock(plain=1, tiles=2).forms(), [x], 5)
    assert x.grad is None
    found.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        assert not dispatch.run("f", Clock(plain=1, tiles=2).forms(), [x], 5).requires_grad


def test_the_whole_matrix_only_where_memory_is_left(gpu: dict[str, int]) -> None:
    """Three of 1 GiB each are a quarter of 12 GiB; 1 GiB is free in torch's own cache."""
    columns = GB // 16
    for free, name in ((11, "plain"), (10, "tiles")):
        gpu["free"] = free * GB
        dispatch._choices.clear()
        clock = Clock(plain=1, tiles=2)
        dispatch.run("f", clock.forms(), [rows()], columns)
        assert clock.calls[-1] == name
        assert ("plain" in clock.calls) == (name == "plain")


def test_a_kernel_that_fails_is_left_out(
    gpu: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(plain=3, tiles=2, fused=1)
    dispatch.run("f", clock.forms("fused"), [rows()], 5)
    assert clock.calls[-1] == "tiles"
    assert "fused fails and is left out: fused needs a larger GPU" in caplog.text
    with pytest.raises(RuntimeError, match="tiles needs"):
        dispatch.run("f", clock.forms("plain", "tiles", "fused"), [rows()], 6)


def test_a_resumed_run_keeps_to_its_choices(gpu: dict[str, int]) -> None:
    dispatch.run("f", Clock(plain=1, tiles=2).forms(), [rows()], 5)
    made = dispatch.choices()
    assert list(made.values()) == ["plain"]
    dispatch._choices.clear()
    dispatch.restore_choices(made)
    slower = Clock(plain=2, tiles=1)
    dispatch.run("f", slower.forms(), [rows()], 5)
    assert slower.calls == ["plain"]
    dispatch.restore_choices(dict.fromkeys(made, "fused"))
    dispatch.run("f", slower.forms(), [rows()], 5)
    assert slower.calls[-1] == "tiles", "what is no longer there is not taken"


def test_nothing_is_timed_where_runs_must_be_repeatable(gpu: dict[str, int]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        clock = Clock(plain=3, tiles=2, fused=1)
        dispatch.run("f", clock.forms(), [rows()], 5)
        two = Clock(plain=3, tiles=2)
        dispatch.run("f", two.forms(), [rows()], 5)
        gpu["free"] = 0
        dispatch.run("f", two.forms(), [rows()], GB // 3)
        dispatch.run("f", two.forms(), [rows()], GB // 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert clock.calls == ["fused"]
    assert two.calls == ["plain", "plain", "tiles"], "of all memory, whatever is free"
    assert not dispatch.choices()


def test_meta_tensors_are_not_timed() -> None:
    query, table = torch.empty(8, 4, device="meta"), torch.empty(9, 4, device="meta")
    with forms_of_a_gpu():
        lse, _ = table_logsumexp(query, table, 5.0)
    assert lse.shape == (1, 8)
    assert not dispatch.choices()


def test_a_compiler_gets_the_plain_form() -> None:
    forms = {"plain": lambda x: x * 2, "tiles": lambda x: pytest.fail("traced")}
    compiled = torch.compile(
        lambda x: dispatch.run("f", forms, [x], GB), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(rows()), torch.full((4, 3), 2.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_times_on_a_gpu() -> None:
    query, table = torch.randn(256, 128).cuda(), torch.randn(65536, 128).cuda()
    query.requires_grad_()
    first, _ = table_logsumexp(query, table, 0.5)
    ((key, _),) = dispatch.choices().items()
    assert key.startswith("table_logsumexp on ")
    assert torch.equal(table_logsumexp(query, table, 0.5)[0], first)
