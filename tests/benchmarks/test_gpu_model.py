"""The model of a GPU: what it counts, its clock, and the bounds of its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from benchmarks.gpu_model import __main__ as program
from benchmarks.gpu_model import tracing
from benchmarks.gpu_model.fake_cuda import fake_cuda, run_backward
from benchmarks.gpu_model.gpus import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, GPUS, LAUNCH
from benchmarks.gpu_model.table import ROWS, Row
from benchmarks.gpu_model.tracing import Cost, Kernel, cost_of
from solo_ext.core.precision import full_precision_products, matmul_precision
from solo_ext.kernels import dispatch
from solo_ext.losses import nt_xent_loss_func, seed_loss_func

H200 = GPUS["h200"]
KIB = 1024


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n.startswith("step of") else n for n in ROWS],
)
def test_bounds(name: str) -> None:
    """No slower than the plain form and without a wait."""
    row = ROWS[name]()
    assert row.label == name
    assert row.met(H200), row.as_json()


def test_the_record_is_of_these_rows() -> None:
    lines = (Path(__file__).parents[2] / program.RECORD).read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines[1:]] == list(ROWS)


def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def square() -> Tensor:
    """Of 1 KiB."""
    return on_cuda(16, 16)


@pytest.mark.parametrize(
    ("work", "kibibytes"),
    [
        (lambda: square() + square(), [3]),
        (lambda: square().fill_(1), [1]),
        (lambda: square().copy_(square()), [2]),
        (lambda: square().T.reshape(2, 128), [2]),
        (lambda: square().T[3:].unsqueeze(0).detach(), []),
        (lambda: square() + on_cuda(16, 1).expand(16, 16), [2 + 1 / 16]),
        (lambda: torch.exp(square(), out=square()), [2]),
        # Rows that are picked, and the int64 ids by which they are.
        (lambda: on_cuda(9999, 16)[on_cuda(16, dtype=torch.int64)], [2 + 1 / 8]),
        (lambda: on_cuda(0, 16) + 1, []),
    ],
)
def test_bytes(work: Callable[[], Tensor], kibibytes: list[float]) -> None:
    with fake_cuda():
        assert [k.bytes / KIB for k in cost_of(work)] == kibibytes


def test_of_an_operation_s_forms_the_one_with_the_shortest_estimate_is_counted() -> None:
    """Gradients included, and nothing of what is tried."""

    def many(x: Tensor) -> Tensor:
        return x + 1 + 1 + 1

    class LongWayBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 1 * 1 * 1 * 1 * 1

    with fake_cuda():
        x = square().requires_grad_()
        forms: Any = {"plain": LongWayBack.apply, "tiles": many}
        assert len(cost_of(lambda: dispatch.run("f", forms, [x], 16))) == 3
        assert len(cost_of(lambda: dispatch.run("f", forms, [x.detach()], 16))) == 1


@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda x: float(x.sum()), ["aten::_local_scalar_dense"]),
        (lambda x: x.cpu(), ["aten::_to_copy"]),
        (lambda x: torch.ones(3).to("cuda"), ["aten::_to_copy"]),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), []),
        (lambda x: torch.equal(x, x), ["aten::equal"]),
        (lambda x: x[x > 0].sum(), ["aten::index"]),
        (lambda x: torch.where(x > 0, x, 0.0).sum(), []),
    ],
)
def test_waits(work: Callable[[Tensor], Any], waits: list[str]) -> None:
    with fake_cuda():
        x = square()
        assert cost_of(lambda: work(x)).waits == waits


def test_products_have_the_dtype_that_autocast_gives_them() -> None:
    def product() -> Tensor:
        return square() @ square()

    def kept() -> None:
        with full_precision_products(torch.device("cuda")):
            product()

    def rounded() -> None:
        with matmul_precision("high"), torch.autocast("cuda", enabled=False):
            product()

    flops = 2 * 16**3
    with fake_cuda(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert product().dtype == torch.bfloat16
        assert cost_of(product).flops == {"bfloat16": flops}
        assert cost_of(kept).flops == {"float32": flops}
        assert cost_of(rounded).flops == {"tf32": flops}


@torch.library.custom_op("gpu_model_test::product", mutates_args=())
def product_of_ours(x: Tensor, y: Tensor, factors: torch.dtype) -> Tensor:
    raise AssertionError("a GPU would be needed")


@product_of_ours.register_fake
def _(x: Tensor, y: Tensor, factors: torch.dtype) -> Tensor:
    return x.new_empty(len(x), len(y))


@register_flop_formula(torch.ops.gpu_model_test.product)
def _(x: Any, y: Any, *_: Any, **__: Any) -> Any:
    return 2 * x[0] * x[1] * y[0]


def test_operations_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels count by what they say of themselves."""
    monkeypatch.setitem(tracing.LAUNCHES, "gpu_model_test::product", 2)
    flops = 2 * 16**3
    with fake_cuda():
        narrow = cost_of(lambda: product_of_ours(square(), square(), torch.bfloat16))
        split = cost_of(lambda: product_of_ours(square(), square(), torch.float32))
    assert [k.bytes / KIB for k in narrow] == [3, 0]
    assert narrow.flops == {"bfloat16": flops}
    assert split.flops == {"tf32": tracing.SPLIT * flops}


def test_a_backward_pass_is_traced() -> None:
    with fake_cuda():
        x = square().requires_grad_()
        loss = (x @ x).logsumexp(1).sum()
        cost = cost_of(loss.backward)
    assert cost.flops == {"float32": 2 * 2 * 16**3}
    assert x.grad is not None
    assert x.grad.device.type == "cuda"


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_backward_pass_is_that_of_torch(create_graph: bool) -> None:
    """Kernels with a backward pass of their own, broadcasting, several uses, unused inputs."""
    x, y, bias = (torch.randn(*s, requires_grad=True) for s in ((6, 4), (6, 4), (4,)))
    unused = torch.randn(2, requires_grad=True)

    def loss() -> Tensor:
        if create_graph:
            return ((x * y + bias).tanh() ** 2).sum()
        queue = F.normalize(torch.ones(9, 4), dim=1)
        return nt_xent_loss_func(x + bias, y) + seed_loss_func(x, y.detach(), queue)

    inputs = [x, y, bias, unused]
    expected = torch.autograd.grad(loss(), inputs, create_graph=create_graph, allow_unused=True)
    found = run_backward([loss()], [torch.ones(())], False, create_graph, inputs)
    assert found[3] is None
    assert expected[3] is None
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs)
    run_backward([loss()], [torch.ones(())], False, False, accumulate_grad=True)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected[0].detach())


def test_clock() -> None:
    """The device waits to be told, and does one thing at a time."""
    second = H200.bandwidth * ATTAINED_BANDWIDTH
    long, short = Kernel("copy", int(second)), Kernel("add", 1)
    by_flops = int(H200.flops["tf32"] * ATTAINED_FLOPS)
    assert Cost([long]).milliseconds(H200) == pytest.approx(1e3 * (1 + LAUNCH))
    assert Cost([short] * 100).milliseconds(H200) == pytest.approx(1e3 * 100 * LAUNCH)
    # Launches are hidden behind the long one, unless the host waits for it.
    hidden = Cost([long, *[short] * 100]).milliseconds(H200)
    waited = Cost([long._replace(waits=True), *[short] * 100]).milliseconds(H200)
    assert hidden == pytest.approx(1e3 * (1 + LAUNCH))
    assert waited == pytest.approx(1e3 * (1 + 101 * LAUNCH))
    assert Cost([Kernel("mm", 1, by_flops, "tf32")]).milliseconds(H200) > 1e3


FEW, MANY = Cost([Kernel("add", 1)]), Cost([Kernel("add", 1)] * 2)
WAITS = Cost([Kernel("nonzero", 1, waits=True)])


@pytest.mark.parametrize(
    ("ours", "plain", "met"),
    [(FEW, MANY, True), (MANY, FEW, False), (WAITS, None, False), (FEW, None, True)],
)
def test_a_miss_is_an_error(
    ours: Cost,
    plain: Cost | None,
    met: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "ROWS", {"a row": lambda: Row("a row", ours, plain)})
    assert program.main(["--check"]) == int(not met)
    assert capsys.readouterr().err == ("" if met else "a row is missed\n")
    assert not list(tmp_path.iterdir())


def test_rows_as_json_and_the_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / program.RECORD).parent.mkdir(parents=True)
    monkeypatch.setattr(program, "ROWS", {"a row": lambda: Row("a row", MANY, FEW)})
    assert program.main(["--json"]) == 0
    printed = capsys.readouterr().out
    about, row = map(json.loads, printed.splitlines())
    assert set(about["gpus"]) == set(row["met"]) == set(GPUS)
    assert row["ours"]["launches"] == 2
    assert row["met"] == dict.fromkeys(GPUS, False)
    assert program.main([]) == 0
    assert (tmp_path / program.RECORD).read_text() == printed
    assert "| a row | 2 / 1 |" in (tmp_path / program.RECORD).with_suffix(".md").read_text()
