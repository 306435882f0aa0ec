"""What holds for all operations: their forms are equal, and gradients of the forward pass right.

The forms of the in-batch contrast and of two views are compared in ``test_in_batch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.in_batch import batch_contrast, two_view_contrast
from solo_ext.kernels.mixed_logsumexp import MixDraws, mixed_logsumexp
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import Assignment, assign
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses.mochi import draw_mixes
from solo_ext.memory import sinkhorn
from tests.kernels.conftest import Force, Launches, Tiled, unit

N, K, D = 6, 23, 5
Found = tuple[Tensor, ...]
Kernel = Callable[[Tensor, Tensor], Tensor]
"""Scalar of (6, 5) queries and a (23, 5) table."""


def rows(count: int, *lead: int) -> Tensor:
    return F.normalize(torch.randn(*lead, count, D, dtype=torch.float64), dim=-1)


def targets(scores: Tensor, iterations: int) -> Assignment:
    return assign(lambda r, c: scores[r, c] * 1, tuple(scores.shape), scores, iterations)


def of_prototypes(prior: bool, dtype: torch.dtype) -> Callable[..., Found]:
    teachers = [targets(torch.randn(9, 13, dtype=torch.float64), n) for n in (0, 3)]
    weights = torch.rand(3, 2, dtype=torch.float64)
    q = torch.rand(13, dtype=torch.float64) + 0.1 if prior else None

    def work(student: Tensor, prototypes: Tensor) -> Found:
        shared = teachers, weights / weights.sum(), q, 4.0
        table = prototypes.detach().to(dtype)
        return prototype_contrast(student, prototypes, *shared, table=table)

    return work


def mixed(with_table: bool, pairs: int, singles: int, exclude: bool) -> Callable[..., Found]:
    draws = MixDraws(
        torch.randint(4, (7, pairs, 2)),
        torch.rand(7, pairs, dtype=torch.float64),
        torch.randint(4, (7, singles)),
        torch.rand(7, singles, dtype=torch.float64) / 2,
    )
    table = rows(20)
    ids = {"query_ids": torch.arange(7), "table_ids": torch.arange(20) % 10} if exclude else {}
    columns = torch.randint(20, (7, 2)) if exclude else None

    def work(query: Tensor) -> Found:
        settings = 5.0, draws, 4, (1.0, 0.5)
        return mixed_logsumexp(
            query, table, *settings, excluded_columns=columns, with_table=with_table, **ids
        )

    return work


def of_sinkhorn(products: bool) -> Callable[..., Found]:
    logits = 4 * rows(9) @ rows(13).T

    def work() -> Found:
        return assign(lambda r, c: logits[r, c] * 1, (9, 13), logits, 3, products=products)

    return work


def cases() -> Iterator[Any]:
    torch.manual_seed(0)
    for prior, dtype in ((False, torch.float64), (True, torch.float64), (True, torch.bfloat16)):
        given = [rows(9, 3), rows(13)]
        yield pytest.param(of_prototypes(prior, dtype), given, id=f"prototypes-{prior}-{dtype}")
    for settings in ((True, 5, 3, False), (True, 5, 0, True), (False, 0, 3, True)):
        yield pytest.param(mixed(*settings), [rows(7)], id=f"mixed-{settings}")
    for products in (False, True):
        yield pytest.param(of_sinkhorn(products), [], id=f"sinkhorn-{products}")


@pytest.mark.parametrize(("work", "given"), list(cases()))
def test_forms_are_equal(
    work: Callable[..., Found], given: list[Tensor], force: Force, tiled: Tiled, request: Any
) -> None:
    def with_gradients() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in given]
        found = work(*inputs)
        learns = [x.sum() for x in found if x.requires_grad]
        return [*found, *(torch.autograd.grad(sum(learns), inputs) if inputs else ())]

    force("plain")
    plain = with_gradients()
    tiled(2)
    tiles = with_gradients()
    # bf16 rounds the gradients to its factors, and the forms add them up in another order.
    limit = 1e-2 if "bfloat16" in request.node.name else 1e-9
    for one, other in zip(plain, tiles, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert (one - other).nan_to_num().norm() <= limit * other.nan_to_num().norm()


def test_sinkhorn_s_form_depends_on_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only on the prototypes, where scores are given and no features."""
    sizes: list[int] = []

    def note(operation: str, forms: Any, inputs: Any, columns: int, details: Any) -> dispatch.Form:
        sizes.append(len(inputs[0]) * columns)
        return "tiles"

    monkeypatch.setattr(dispatch, "_form", note)
    sinkhorn(rows(9) @ rows(13).T, unit=True)
    assert sizes
    assert set(sizes) == {9 * 13}


def in_batch(query: Tensor, table: Tensor) -> Tensor:
    def reduce(lse: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(lse[0] - positives[:, 0]), lse

    own = torch.arange(N).unsqueeze(1)
    positives = torch.zeros(N, 1, dtype=query.dtype)
    return batch_contrast(query, table, own, positives, 3.0, (1.0,), reduce)[0]


def mixtures(query: Tensor, table: Tensor) -> Tensor:
    draws = draw_mixes(query, 4, 6, 3, torch.Generator().manual_seed(0))
    return mixed_logsumexp(query, table, 3.0, draws, 4, (1.7, 0.7)).lse.sum()


def prototypes(query: Tensor, table: Tensor) -> Tensor:
    scores = torch.linspace(0, 1, N * K, dtype=query.dtype).view(N, K)
    one = torch.ones(1, 1, dtype=query.dtype)
    return prototype_contrast(query[None], table, [targets(scores, 3)], one, None, 3.0)[0]


KERNELS: dict[str, Kernel] = {
    "two views": lambda q, t: two_view_contrast(q, t[:N], 2.0, 0.1, 0.5)[0],
    "in_batch": in_batch,
    "mixed": mixtures,
    "prototypes": prototypes,
    "table": lambda q, t: table_logsumexp(q, t, 3.0, powers=(1.5, 0.5))[0].sum(),
    "bounded table": lambda q, t: table_logsumexp(q, t, 3.0, unit=True)[0].sum(),
}


@pytest.fixture(params=KERNELS)
def kernel(request: Any, tiled: Tiled) -> Kernel:
    """Every one of them; all work is done in several tiles."""
    tiled(2)
    return KERNELS[request.param]


def inputs() -> tuple[Tensor, Tensor]:
    return unit(N, D).requires_grad_(), unit(K, D, seed=1)


def test_gradient_follows_the_factor_of_the_loss(kernel: Kernel) -> None:
    """Which a scaler of half precision makes large; the backward pass may be repeated."""
    query, table = inputs()
    loss = kernel(query, table)
    first, second = (
        torch.autograd.grad(loss * factor, query, retain_graph=True)[0] for factor in (1, 2**16)
    )
    assert first.any()
    assert torch.equal(2**16 * first, second)


def test_the_table_may_be_overwritten_before_the_backward_pass(kernel: Kernel) -> None:
    query, table = inputs()
    (expected,) = torch.autograd.grad(kernel(query, table), query)
    loss = kernel(query, table)
    table.zero_()
    assert torch.equal(torch.autograd.grad(loss, query)[0], expected)


def test_a_second_derivative_is_refused(kernel: Kernel) -> None:
    query, table = inputs()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(kernel(query, table), query, create_graph=True)


def test_no_gradient_where_none_is_wanted(kernel: Kernel, launches: Launches) -> None:
    query, table = inputs()
    full, loss = launches(lambda: kernel(query, table)), kernel(query, table)
    with torch.no_grad():
        silent = kernel(query, table)
        assert launches(lambda: kernel(query, table)) < full
    constant = kernel(query.detach(), table)
    assert not silent.requires_grad
    assert not constant.requires_grad
    torch.testing.assert_close(silent, loss.detach())
    assert torch.equal(constant, silent)
