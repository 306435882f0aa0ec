"""Contrastive losses on rows, precisions and devices that are out of the ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.contrastive import (
    PLAIN,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    debiased_loss_func,
    hard_negative_loss_func,
    nt_xent_loss_func,
)
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.mochi import Mixing, draw_mixes, mochi_loss_func
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func

Loss = Callable[[list[Tensor], float], Tensor]
HARD = NegativeEstimator(0.1, 0.7)


def mixing(anchors: Tensor, most: int, pairs: int = 5, singles: int = 3) -> Mixing:
    generator = None if anchors.is_meta else torch.Generator().manual_seed(0)
    # The same draws whatever the precision.
    return Mixing(most, draw_mixes(anchors.float(), most, pairs, singles, generator))


def mochi(x: list[Tensor], temperature: float, singles: int = 3) -> Tensor:
    made = mixing(x[0], min(3, len(x[2])), singles=singles)
    return mochi_loss_func(*x, temperature, made.num_hard, draws=made.draws)


def mixed_queue(x: list[Tensor], temperature: float) -> Tensor:
    with full_precision_products(x[0].device):
        query, positive = (F.normalize(row, dim=1) for row in full_precision(*x[:2]))
    return contrastive(
        query,
        positive.unsqueeze(1),
        x[2].detach(),
        estimator=HARD,
        mixing=mixing(x[0], min(3, len(x[2]))),
        temperature=temperature,
    ).loss


def of_views(estimator: NegativeEstimator, mixes: bool = False) -> Loss:
    def loss(x: list[Tensor], temperature: float) -> Tensor:
        batch = batch_of_views(x)
        made = mixing(batch.anchors, 3) if mixes else None
        return contrastive(
            **batch._asdict(), estimator=estimator, mixing=made, temperature=temperature
        ).loss

    return loss


LOSSES: dict[str, Loss] = {
    "nt_xent": lambda x, t: nt_xent_loss_func(x[0], x[1], t),
    "debiased": lambda x, t: debiased_loss_func(x[0], x[1], t, 0.1),
    "hard": lambda x, t: hard_negative_loss_func(x[0], x[1], t, 0.1, 1.0),
    "hard, detached": lambda x, t: hard_negative_loss_func(x[0], x[1], t, 0.1, 1.0, True),
    "very hard": lambda x, t: hard_negative_loss_func(x[0], x[1], t, 0.1, 200.0),
    "row of nnclr": lambda x, t: nnclr_symmetric_loss_func(x[0], x[1], t, False),
    "nnclr": lambda x, t: nnclr_symmetric_loss_func(x[0], x[1], t),
    "info_nce": lambda x, t: info_nce_loss_func(x[0], x[1], x[2].detach(), t),
    "info_nce, queue learns": lambda x, t: info_nce_loss_func(*x, t),
    "mochi": lambda x, t: mochi([x[0], x[1], x[2].detach()], t),
    "mochi, queue learns": mochi,
    "mochi, hard": mixed_queue,
    "three views": of_views(PLAIN),
    "three views, hard": of_views(HARD),
    "three views, mixed": of_views(HARD, mixes=True),
}
BY_QUEUE = {"info_nce", "info_nce, queue learns", "mochi", "mochi, queue learns", "mochi, hard"}
ALL = pytest.mark.parametrize("name", LOSSES)


def make(rows: int = 4, dim: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns three views, similar row by row; the third of unit rows, as of a queue."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, rows, dim, generator=generator, dtype=torch.float64)
    views = [*(centres + 0.7 * noise)]
    return [3 * views[0].to(dtype), views[1].to(dtype), F.normalize(views[2], dim=1).to(dtype)]


def awkward(case: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns views that a failing or starting network may give."""
    views = make(4, dtype=dtype)
    ones = F.normalize(torch.ones_like(views[0]), dim=1)
    zeros = torch.zeros_like(ones)
    first = torch.arange(4).unsqueeze(1) == 1
    return {
        "collapsed": [ones, ones, ones],
        "opposite": [ones, -ones, ones],
        "opposite queue": [ones, ones, -ones],
        "duplicate": [z[[0, 0, 2, 3]] for z in views],
        "views equal": [views[2]] * 3,
        "zero row": [torch.where(first, zeros, views[0]), *views[1:]],
        "zero in all": [torch.where(first, zeros, z) for z in views],
        "all zero": [zeros] * 3,
        "single": [z[:1] for z in views],
    }[case]


def gradients(loss: Tensor, x: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, x, materialize_grads=True))


def if_collapsed(name: str) -> float:
    """All samples are alike: the loss counts them."""
    negatives = {"three": 9, "mochi": 4 + 8, "info_": 4, "nnclr": 3, "row o": 3}.get(name[:5], 6)
    return math.log(1 + negatives + (8 if name == "three views, mixed" else 0))


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    [
        "collapsed",
        "opposite",
        "opposite queue",
        "duplicate",
        "views equal",
        "zero row",
        "zero in all",
        "all zero",
        "single",
    ],
)
def test_awkward_rows_stay_finite(name: str, case: str, dtype: torch.dtype) -> None:
    for temperature in (0.01, 0.1, 0.5):
        x = [z.clone().requires_grad_() for z in awkward(case, dtype)]
        loss = LOSSES[name](x, temperature)
        assert loss.requires_grad
        assert loss.isfinite()
        assert loss >= 0
        found = gradients(loss, x)
        assert all(g.isfinite().all() for g in found)
        if case == "single" and name not in BY_QUEUE:
            assert loss.item() == 0
            assert not any(g.any() for g in found)
        if case == "collapsed":
            assert loss.item() == pytest.approx(if_collapsed(name), rel=1e-3)


@pytest.mark.parametrize("name", sorted(BY_QUEUE))
def test_empty_queue_gives_zero_on_the_graph(name: str) -> None:
    x = make()
    x = [z.requires_grad_() for z in (x[0], x[1], x[2][:0])]
    query, positive, queue = x
    loss = (
        mochi_loss_func(query, positive, queue)
        if name.startswith("mochi")
        else LOSSES[name](x, 0.2)
    )
    assert loss.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, x[:2]))


@ALL
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_single_precision_keeps_up(name: str, temperature: float) -> None:
    exact = [z.requires_grad_() for z in make(16, 8)]
    single = [z.detach().float().requires_grad_() for z in exact]
    expected, found = (LOSSES[name](x, temperature) for x in (exact, single))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-4, abs=1e-6)
    for one, two in zip(gradients(found, single), gradients(expected, exact), strict=True):
        assert (one.double() - two).norm() <= 2e-3 * two.norm() + 1e-6


@ALL
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
def test_autocast_computes_in_single_precision(
    name: str, half: torch.dtype, temperature: float
) -> None:
    loss, single = LOSSES[name], make(16, 8, torch.float32)
    halves = [z.to(half).requires_grad_() for z in single]
    with torch.autocast("cpu", dtype=half):
        assert F.linear(single[0], single[1]).dtype == half, "autocast must be on"
        from_single, from_half = loss(single, temperature), loss(halves, temperature)
    assert from_single.dtype == from_half.dtype == torch.float32
    assert torch.equal(from_single, loss(single, temperature))
    # What is lost is what rounding the inputs loses, and nothing more.
    rounded = [z.detach().float().requires_grad_() for z in halves]
    expected = loss(rounded, temperature)
    assert torch.equal(from_half, expected)
    for found, wanted in zip(
        gradients(from_half, halves), gradients(expected, rounded), strict=True
    ):
        assert found.dtype == half
        assert torch.equal(found, wanted.to(half))


class OnMeta(TorchDispatchMode):
    """Refuses tensors of another device: a copy between devices waits for both."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            assert not isinstance(tensor, Tensor) or tensor.is_meta, func
        return out


@ALL
def test_runs_without_looking_at_values(name: str) -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    x = [torch.empty(6, 4, device="meta", requires_grad=True) for _ in range(3)]
    with OnMeta():
        loss = LOSSES[name](x, 0.1)
        loss.backward()
    assert loss.is_meta
    assert loss.shape == ()
    assert x[0].grad is not None
    assert x[1].grad is not None


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("in_batch", [False, True])
def test_all_terms_are_made_without_looking_at_values(in_batch: bool, mixes: bool) -> None:
    x = [torch.empty(6, 4, device="meta", requires_grad=True) for _ in range(3)]
    with OnMeta():
        terms = contrastive(
            x[0],
            x[1].unsqueeze(1),
            x[2] if in_batch else x[2].detach(),
            estimator=HARD,
            mixing=mixing(x[0], 3) if mixes else None,
            temperature=0.1,
        )
    assert all(term.is_meta for term in terms)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize(
    "name", [n for n in LOSSES if "detached" not in n and "mixed" not in n and "mochi" not in n]
)
def test_gradcheck(name: str, temperature: float) -> None:
    """Of all whose gradient holds nothing fixed."""
    *inputs, last = make(3, 3)
    inputs = [z.requires_grad_() for z in inputs]
    if name != "info_nce":
        inputs.append(last.requires_grad_())
    rest = [last] if name == "info_nce" else []
    assert torch.autograd.gradcheck(lambda *x: LOSSES[name]([*x, *rest], temperature), inputs)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_gradcheck_of_mixed_pairs(temperature: float) -> None:
    *inputs, queue = make(3, 3)
    inputs = [z.requires_grad_() for z in inputs]
    assert torch.autograd.gradcheck(
        lambda q, k: mochi([q, k, queue], temperature, singles=0), inputs
    )
