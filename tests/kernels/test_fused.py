"""The Triton kernels against the plain forms, and whether they compile for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels.nearest_rows import NearestRows, nearest_rows
from solo_ext.kernels.tables import table_logsumexp, table_mean
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func, seed_loss_func
from tests.kernels import conftest
from tests.kernels.conftest import Force, slope

SIZES = pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 300, 24), (37, 65, 130)])
"""Of queries, rows and columns: none is a multiple of a block, and the table has several shares."""


def rows(*shape: int, seed: int = 0) -> Tensor:
    return conftest.normal(*shape, seed=seed, dtype=torch.float32)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return conftest.unit(*shape, seed=seed, dtype=torch.float32)


def both(force: Force, work: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernels give, and what the plain forms do."""
    force("fused")
    fused = work()
    force("plain")
    return fused, work()


def nearest_by_both(
    force: Force, query: Tensor, table: Tensor, **ids: Tensor
) -> tuple[NearestRows, NearestRows]:
    return both(force, lambda: nearest_rows(query, table, **ids))


def halved(x: Tensor) -> Tensor:
    """Values of bf16 in fp64: a GPU rounds to the nearest, and Triton's interpreter towards 0."""
    if x.is_cuda:
        return x.bfloat16().double()
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).double()


@SIZES
@pytest.mark.parametrize(
    ("powers", "kind"),
    [((1.0,), "all"), ((1.7, 0.7), "weighted"), ((1.7, 0.7), "drawn"), ((1.0,), "half table")],
)
def test_log_sum_exps_equal_the_plain_form(
    sizes: tuple[int, int, int],
    powers: tuple[float, ...],
    kind: str,
    device: torch.device,
    force: Force,
) -> None:
    n, k, d = sizes
    query, table = unit(n, d).to(device).requires_grad_(), unit(k, d, seed=1).to(device)
    columns = torch.arange(2 * k, device=device) * 7 % k if kind == "drawn" else None
    count = k if columns is None else len(columns)
    log_weight = torch.linspace(-3, 2, count, device=device) if kind == "weighted" else None
    if kind == "half table":
        table = table.bfloat16()

    def found(table: Tensor) -> tuple[Tensor, ...]:
        given: Any = {"powers": powers, "columns": columns, "log_weight": log_weight}
        lse, largest = table_logsumexp(query, table, 5.0, **given)
        return lse, largest, slope(lse, query)

    force("fused")
    fused = found(table)
    force("plain")
    torch.testing.assert_close(fused, found(table.float()), rtol=2e-5, atol=2e-5)


@SIZES
def test_factors_of_half_precision(
    sizes: tuple[int, int, int], device: torch.device, force: Force
) -> None:
    """Products of rounded factors, with sums and exponentials in fp32."""
    n, k, d = sizes
    query, table = unit(n, d).to(device).requires_grad_(), unit(k, d, seed=1).to(device)
    force("fused")
    lse, _ = table_logsumexp(query, table, 5.0, compute_dtype=torch.bfloat16)
    rounded = halved(table)
    logits = halved((query * 5.0).detach()) @ rounded.T
    torch.testing.assert_close(lse[0], logits.logsumexp(1).float(), rtol=1e-5, atol=1e-5)
    expected = logits.softmax(1) @ rounded * 5
    found = torch.autograd.grad(lse.sum(), query)[0]
    assert (found - expected).norm() < 8e-3 * expected.norm()


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_means(scale: float, device: torch.device, force: Force) -> None:
    query, table = unit(9, 20).to(device), unit(130, 20, seed=1).to(device)
    found = both(force, lambda: table_mean(query, table, scale))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_rows_without_weight(device: torch.device, force: Force) -> None:
    """All of the first share's, all of the table's, and an empty table."""
    query, table = unit(3, 8).to(device).requires_grad_(), unit(300, 8, seed=1).to(device)
    late = torch.where(torch.arange(300) > 250, 0.0, float("-inf")).to(device)
    force("fused")
    lse, largest = table_logsumexp(query, table, 5.0, log_weight=late)
    logits = 5.0 * query @ table.T
    torch.testing.assert_close(lse[0], logits[:, 251:].logsumexp(1))
    torch.testing.assert_close(largest, logits.detach().amax(1))
    torch.testing.assert_close(slope(lse, query), slope(logits[:, 251:].logsumexp(1), query))
    nothing = torch.full_like(late, float("-inf"))
    for given, weight in ((table, nothing), (table[:0], None)):
        lse, _ = table_logsumexp(query, given, 5.0, log_weight=weight)
        assert (lse == float("-inf")).all()
        assert not slope(lse, query).any()


def test_columns_of_wider_tensors(device: torch.device, force: Force) -> None:
    """Ids, weights and columns with a stride; the kernels read one number after the other."""
    query, table = rows(4, 8).to(device), rows(70, 8, seed=1).to(device)
    table[:4] = 10 * query
    ids = torch.stack((torch.arange(70), torch.full((70,), -1)), 1).to(device)
    fused, plain = nearest_by_both(force, query, table, query_ids=ids[:4, 0], table_ids=ids[:, 0])
    assert torch.equal(fused.index, plain.index)
    weight = torch.stack((torch.linspace(-3, 2, 70), torch.zeros(70)), 1).to(device)[:, 0]
    columns = torch.stack((torch.arange(70) % 9, torch.arange(70)), 1).to(device)[:, 0]
    given = {"columns": columns, "log_weight": weight}
    sums = both(force, lambda: table_logsumexp(query, table, 0.1, **given)[0])
    torch.testing.assert_close(*sums)


def test_a_diverged_query_is_seen(device: torch.device, force: Force) -> None:
    query, table = rows(6, 8).to(device), rows(300, 8, seed=1).to(device)
    query[2, 5] = float("nan")
    force("fused")
    lse, _ = table_logsumexp(query, table, 5.0)
    index, similarity = nearest_rows(query, table)
    for found in (lse[0], similarity[:, 0]):
        assert found.isnan().tolist() == [i == 2 for i in range(6)]
    assert (index < 300).all()


@pytest.mark.parametrize("loss", ["info_nce", "proto_nce", "merged", "seed"])
def test_losses_and_their_gradients(loss: str, device: torch.device, force: Force) -> None:
    query = unit(10, 24).to(device).requires_grad_()
    key, table = unit(10, 24, seed=1).to(device), unit(150, 24, seed=2).to(device)
    ids, phi = torch.arange(10).to(device) // 2, torch.linspace(0.1, 0.3, 150).to(device)
    losses: dict[str, Callable[[], Tensor]] = {
        "info_nce": lambda: info_nce_loss_func(query, key, table),
        "proto_nce": lambda: proto_nce_loss_func(query, table, phi, ids),
        "merged": lambda: proto_nce_loss_func(query, table, phi, ids, ids + 50, "merge"),
        "seed": lambda: seed_loss_func(query, key, table, teacher_temperature=0.05),
    }

    def found() -> tuple[Tensor, Tensor]:
        value = losses[loss]()
        return value, torch.autograd.grad(value, query)[0]

    torch.testing.assert_close(*both(force, found), rtol=2e-5, atol=2e-6)


def test_kernels_describe_themselves(device: torch.device) -> None:
    """Shapes without values, for what traces a step."""
    from solo_ext.kernels.fused_logsumexp import fused_logsumexp
    from solo_ext.kernels.fused_nearest import fused_nearest

    given = rows(3, 8).to(device), rows(30, 8, seed=1).to(device)
    for operation, rest in (
        (fused_logsumexp, (5.0, None, None, torch.float32, True)),
        (fused_logsumexp, (5.0, None, None, torch.float32, False)),
        (fused_nearest, (None, None)),
    ):
        utils = "test_schema", "test_faketensor"
        torch.library.opcheck(operation, (*given, *rest), test_utils=utils)


def test_log_sum_exps_are_the_same_at_every_call(device: torch.device, force: Force) -> None:
    query, table = unit(40, 32).to(device).requires_grad_(), unit(500, 32, seed=1).to(device)
    force("fused")
    one, two = (table_logsumexp(query, table, 5.0)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(slope(one, query), slope(two, query))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 200, 24), (33, 65, 130)])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_nearest_rows_equal_the_whole_matrix(
    sizes: tuple[int, int, int], with_ids: bool, half: bool, device: torch.device, force: Force
) -> None:
    """Rows of any length; ids leave out a third of them, and one query's every row."""
    n, k, d = sizes
    query, table = rows(n, d).to(device), 3 * rows(k, d, seed=1).to(device)
    ids = {}
    if with_ids:
        own = torch.arange(n, device=device) % 3
        ids = {"query_ids": own, "table_ids": torch.arange(k, device=device) % 3}
    fused, plain = nearest_by_both(force, query, table.bfloat16() if half else table, **ids)
    assert torch.equal(fused.index, plain.index) or (with_ids and k == 1)
    torch.testing.assert_close(fused.similarity, plain.similarity)


def test_finds_what_bf16_would_miss(device: torch.device, force: Force) -> None:
    """Rows that differ by less than bf16 tells apart, spread over many blocks."""
    centre = F.normalize(rows(1, 32), dim=1)
    table = F.normalize(centre + 1e-3 * rows(700, 32, seed=1), dim=1).to(device)
    query = F.normalize(centre + 1e-3 * rows(8, 32, seed=2), dim=1).to(device)
    fused, plain = nearest_by_both(force, query, table)
    narrow = (query.bfloat16() @ table.bfloat16().T).argmax(1, keepdim=True)
    assert not torch.equal(narrow, plain.index), "else it would show nothing"
    # Products that differ by fp32's rounding alone may be ranked either way.
    exact = (query.double() @ table.double().T).gather(1, fused.index)
    best = (query.double() @ table.double().T).amax(1, keepdim=True)
    assert ((best - exact) < 4e-7).all()


@pytest.mark.parametrize(
    ("nearest", "other"),
    [
        # 2.006 is rounded to 2; the other row is exact and lies between.
        ((1.003, 1.003), (1 + 2**-7, 1 - 2**-8)),
        # The nearest row is exact; 0.997 is rounded to 1, which is above it.
        ((1.0, -(2**-9)), (2.0, -1.003)),
    ],
)
@pytest.mark.parametrize("place", [3, 70])
def test_rounding_is_allowed_for(
    nearest: tuple[float, float],
    other: tuple[float, float],
    place: int,
    device: torch.device,
    force: Force,
) -> None:
    """A block's bounds hold although its rows are rounded and those of the other are not."""
    table = torch.zeros(128, 2)
    table[place], table[73 - place] = torch.tensor(nearest), torch.tensor(other)
    fused, _ = nearest_by_both(force, torch.ones(1, 2).to(device), table.to(device))
    assert fused.index.item() == place


def test_of_equal_rows_the_first_is_nearest(device: torch.device, force: Force) -> None:
    """Within a block, and in different ones."""
    table = F.one_hot(torch.arange(300) % 7, 8).float().to(device)
    query = torch.eye(8).to(device)
    fused, _ = nearest_by_both(force, query, table)
    assert fused.index[:7, 0].tolist() == list(range(7))
    assert fused.index[7, 0] == 0, "all are equally far"


def test_no_row_is_left(device: torch.device, force: Force) -> None:
    query, table = rows(3, 8).to(device), rows(70, 8, seed=1).to(device)
    own = torch.tensor([5, 4, 5]).to(device)
    force("fused")
    index, similarity = nearest_rows(
        query, table, query_ids=own, table_ids=torch.full((70,), 5).to(device)
    )
    assert similarity.isfinite()[:, 0].tolist() == [False, True, False]
    assert (similarity[own == 5] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < 70).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_whole_support_set(force: Force) -> None:
    """The table's size, random and in clusters."""
    for spread in (1.0, 0.05):
        centre = rows(100, 256).repeat(984, 1)[:98304]
        table = F.normalize(centre + spread * rows(98304, 256, seed=1), dim=1).cuda()
        query = F.normalize(table[:512] + 0.5 * spread * rows(512, 256, seed=2).cuda(), dim=1)
        fused, _ = nearest_by_both(force, query, table)
        exact = query.double() @ table.double().T
        assert (exact.amax(1, keepdim=True) - exact.gather(1, fused.index) < 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["ptx", pytest.param("cubin", marks=pytest.mark.matrix)])
def test_kernels_compile_for_gpus(to: str, tmp_path: Path) -> None:
    """In a process of its own, since this one may interpret them; ptxas takes most of the time."""
    pytest.importorskip("triton", reason="this build of torch comes without Triton")
    # Triton refuses a kernel, or its shared memory is too large, before LLVM or ptxas optimises
    # anything; what ptxas is given LLVM has optimised.
    fast = {"DISABLE_PTXAS_OPT": "1"} | ({"DISABLE_LLVM_OPT": "1"} if to == "ptx" else {})
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)} | fast
    script = Path(__file__).with_name("compile_for_gpus.py")
    done = subprocess.run([sys.executable, script, to], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 20
