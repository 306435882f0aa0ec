"""The Triton kernel of log-sum-exps over a table against the plain form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.tables import table_logsumexp, table_mean
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func, seed_loss_func

Force = Callable[[dispatch.Form], None]
SIZES = pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 300, 24), (37, 65, 130)])
"""Of queries, rows and columns: none is a multiple of a block, and the table has several shares."""


def rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator), dim=1)


def halved(x: Tensor) -> Tensor:
    """Values of bf16 in fp64: a GPU rounds to the nearest, and Triton's interpreter towards 0."""
    if x.is_cuda:
        return x.bfloat16().double()
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).double()


def slope(lse: Tensor, query: Tensor) -> Tensor:
    """Gradient of a sum in which every log-sum-exp has a weight of its own."""
    each = torch.arange(1.0, lse.numel() + 1, device=lse.device).view_as(lse)
    return torch.autograd.grad((lse * each).sum(), query)[0]


@SIZES
@pytest.mark.parametrize("powers", [(1.0,), (1.7, 0.7)])
@pytest.mark.parametrize("kind", ["all", "weighted", "drawn", "half table"])
def test_equals_the_plain_form(
    sizes: tuple[int, int, int],
    powers: tuple[float, ...],
    kind: str,
    device: torch.device,
    force: Force,
) -> None:
    n, k, d = sizes
    query, table = rows(n, d).to(device).requires_grad_(), rows(k, d, seed=1).to(device)
    columns = torch.arange(2 * k, device=device) * 7 % k if kind == "drawn" else None
    count = k if columns is None else len(columns)
    log_weight = torch.linspace(-3, 2, count, device=device) if kind == "weighted" else None
    if kind == "half table":
        table = table.bfloat16()
    found = {}
    for form in ("fused", "plain"):
        force(form)  # type: ignore[arg-type]
        given = table if form == "fused" else table.float()
        lse, largest = table_logsumexp(
            query, given, 5.0, powers=powers, columns=columns, log_weight=log_weight
        )
        found[form] = lse, largest, slope(lse, query)
    torch.testing.assert_close(found["fused"], found["plain"], rtol=2e-5, atol=2e-5)


@SIZES
def test_factors_of_half_precision(
    sizes: tuple[int, int, int], device: torch.device, force: Force
) -> None:
    """Products of rounded factors, with sums and exponentials in fp32."""
    n, k, d = sizes
    query, table = rows(n, d).to(device).requires_grad_(), rows(k, d, seed=1).to(device)
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
    query, table = rows(9, 20).to(device), rows(130, 20, seed=1).to(device)
    found = {}
    for form in ("fused", "plain"):
        force(form)  # type: ignore[arg-type]
        found[form] = table_mean(query, table, scale)
    torch.testing.assert_close(found["fused"], found["plain"], rtol=1e-4, atol=1e-4)


def test_rows_without_weight(device: torch.device, force: Force) -> None:
    """All of the first share's, all of the table's, and an empty table."""
    query, table = rows(3, 8).to(device).requires_grad_(), rows(300, 8, seed=1).to(device)
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


def test_a_diverged_query_is_seen(device: torch.device, force: Force) -> None:
    query, table = rows(6, 8).to(device), rows(300, 8, seed=1).to(device)
    query[2, 5] = float("nan")
    force("fused")
    lse, _ = table_logsumexp(query, table, 5.0)
    assert lse[0].isnan().tolist() == [i == 2 for i in range(6)]


@pytest.mark.parametrize("loss", ["info_nce", "proto_nce", "merged", "seed"])
def test_losses_and_their_gradients(loss: str, device: torch.device, force: Force) -> None:
    query = rows(10, 24).to(device).requires_grad_()
    key, table = rows(10, 24, seed=1).to(device), rows(150, 24, seed=2).to(device)
    ids, phi = torch.arange(10).to(device) // 2, torch.linspace(0.1, 0.3, 150).to(device)
    losses: dict[str, Callable[[], Tensor]] = {
        "info_nce": lambda: info_nce_loss_func(query, key, table),
        "proto_nce": lambda: proto_nce_loss_func(query, table, phi, ids),
        "merged": lambda: proto_nce_loss_func(query, table, phi, ids, ids + 50, "merge"),
        "seed": lambda: seed_loss_func(query, key, table, teacher_temperature=0.05),
    }
    found = {}
    for form in ("fused", "plain"):
        force(form)  # type: ignore[arg-type]
        value = losses[loss]()
        found[form] = value, torch.autograd.grad(value, query)[0]
    torch.testing.assert_close(found["fused"], found["plain"], rtol=2e-5, atol=2e-6)


def test_describes_itself(device: torch.device) -> None:
    """Shapes without values, for what traces a step."""
    from solo_ext.kernels.fused_logsumexp import fused_logsumexp

    query, table = rows(3, 8).to(device), rows(30, 8, seed=1).to(device)
    for with_mean in (True, False):
        torch.library.opcheck(
            fused_logsumexp,
            (query, table, 5.0, None, None, torch.float32, with_mean),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_the_same_at_every_call(device: torch.device, force: Force) -> None:
    query, table = rows(40, 32).to(device).requires_grad_(), rows(500, 32, seed=1).to(device)
    force("fused")
    one, two = (table_logsumexp(query, table, 5.0)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(slope(one, query), slope(two, query))
