"""All classical losses on what failing, starting or unlucky batches bring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext import losses

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of two (N, 5) batches of rows and (N,) labels below 5."""

LOSSES: dict[str, Loss] = {
    "alignment": lambda x, y, _: losses.alignment_loss_func(x, y),
    "alignment 1": lambda x, y, _: losses.alignment_loss_func(x, y, 1),
    "arcface": lambda x, y, t: losses.arcface_loss_func(cosines(x, y), t),
    "arcface plain": lambda x, y, t: losses.arcface_loss_func(cosines(x, y), t, monotone=False),
    "bilinear": lambda x, y, _: losses.bilinear_info_nce_loss_func(
        x, y, torch.eye(5, device=x.device)
    ),
    "clip": lambda x, y, _: losses.clip_loss_func(x, y, 100.0),
    "contrastive": lambda x, y, t: losses.contrastive_loss_func(x, y, t == t.flip(0)),
    "cosface": lambda x, y, t: losses.cosface_loss_func(cosines(x, y), t),
    "lifted": lambda x, _, t: losses.lifted_structured_loss_func(x, t),
    "lifted max": lambda x, _, t: losses.lifted_structured_loss_func(x, t, smooth=False),
    "n_pair": lambda x, y, _: losses.n_pair_loss_func(x, y, 0.1),
    "nce": lambda x, y, _: losses.nce_loss_func(x[:, 0], y),
    "soft nearest": lambda x, _, t: losses.soft_nearest_neighbor_loss_func(x, t),
    "soft nearest cosine": lambda x, _, t: losses.soft_nearest_neighbor_loss_func(
        x, t, 0.1, "cosine"
    ),
    "sphereface": lambda x, y, t: losses.sphereface_loss_func(
        cosines(x, y), t, feature_norm=torch.linalg.vector_norm(x, dim=1)
    ),
    "triplet": lambda x, y, _: losses.triplet_loss_func(x, y, y.flip(0)),
    "triplet plain": lambda x, y, _: losses.triplet_loss_func(x, y, y.flip(0), squared=False),
    "uniformity": lambda x, _, __: losses.uniformity_loss_func(x),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """(N, 5) cosines of ``x`` with five directions that depend on ``y``."""
    weights = torch.eye(5, dtype=x.dtype, device=x.device) + y.mean(0)
    return F.linear(F.normalize(x, dim=1), F.normalize(weights, dim=1))


def make(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, count, 5, generator=generator)
    return x, x + y, torch.randint(3, (count,), generator=generator)


def awkward(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows and labels as they should not be, but may be."""
    x, y, targets = make()
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    first = torch.arange(6).unsqueeze(1) == 0
    return {
        "collapsed": (ones, ones, targets),
        "collapsed far": (1e3 * ones, 1e3 * ones, targets),
        "collapsed almost": (ones + 1e-7 * x, ones + 1e-7 * y, targets),
        "duplicate": (x[[0, 0, 2, 3, 0, 5]], y[[0, 0, 2, 3, 0, 5]], targets),
        "views equal": (x, x, targets),
        "opposite": (x, -x, targets),
        "single": (x[:1], y[:1], targets[:1]),
        "zero row": (torch.where(first, zeros, x), y, targets),
        "zero pair": (torch.where(first, zeros, x), torch.where(first, zeros, y), targets),
        "all zero": (zeros, zeros, targets),
        "no positives": (x[:5], y[:5], torch.arange(5)),
        "no negatives": (x, y, torch.zeros_like(targets)),
        "huge": (1e6 * x, 1e6 * y, targets),
        "tiny": (1e-30 * x, 1e-30 * y, targets),
    }[case]


CASES = [
    "collapsed",
    "collapsed far",
    "collapsed almost",
    "duplicate",
    "views equal",
    "opposite",
    "single",
    "zero row",
    "zero pair",
    "all zero",
    "no positives",
    "no negatives",
    "huge",
    "tiny",
]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_finite(name: str, case: str, dtype: torch.dtype) -> None:
    x, y, targets = awkward(case)
    x, y = (z.to(dtype).clone().requires_grad_() for z in (x, y))
    # Finite all along the backward pass, else this mode, which users debug with, raises.
    with torch.autograd.set_detect_anomaly(True):
        loss = LOSSES[name](x, y, targets)
        loss.backward()
    assert loss.shape == ()
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert y.grad is None or y.grad.isfinite().all()


@EVERY
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_single_precision(name: str, half: torch.dtype) -> None:
    rounded = [z.to(half) for z in make(16)[:2]]
    targets, loss = make(16)[2], LOSSES[name]
    # The features' own product, outside the loss, is rounded as autocast will have it.
    outside = "face" in name
    one, two = (z.float() for z in rounded)
    halves = [z.clone().requires_grad_() for z in rounded]
    with torch.autocast("cpu", dtype=half):
        assert F.linear(one, two).dtype == half, "autocast must be on"
        from_single, from_half = loss(one, two, targets), loss(halves[0], halves[1], targets)
    assert from_single.dtype == from_half.dtype == torch.float32
    if not outside:
        expected = loss(one, two, targets)
        assert torch.equal(from_single, expected)
        assert torch.equal(from_half, expected)
    from_half.backward()
    for z in halves:
        assert z.grad is None or (z.grad.dtype == half and z.grad.isfinite().all())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_margin_losses_of_half_cosines(half: torch.dtype) -> None:
    cosine = cosines(*make(16)[:2]).to(half)
    targets = make(16)[2]
    for loss in (losses.arcface_loss_func, losses.cosface_loss_func, losses.sphereface_loss_func):
        with torch.autocast("cpu", dtype=half):
            found = loss(cosine, targets)
        assert torch.equal(found, loss(cosine.float(), targets))


@EVERY
@pytest.mark.parametrize("count", [1, 6])
def test_runs_without_looking_at_values(name: str, count: int) -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    x, y, targets = (z.to("meta") for z in make(count))
    x.requires_grad_()
    loss = LOSSES[name](x, y, targets)
    loss.backward()
    assert loss.shape == ()
    assert x.grad is not None


@EVERY
def test_single_precision_keeps_up(name: str) -> None:
    x, y, targets = make(24, seed=1)
    found, expected = (
        LOSSES[name](x.to(dtype), y.to(dtype), targets) for dtype in (torch.float32, torch.float64)
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        losses.arcface_loss_func,
        losses.cosface_loss_func,
        losses.sphereface_loss_func,
        lambda c, t, scale: losses.clip_loss_func(c, c.flip(1), scale),
        lambda c, t, scale: losses.bilinear_info_nce_loss_func(
            c, c.flip(1), torch.eye(5), 1 / scale
        ),
        lambda c, t, scale: losses.soft_nearest_neighbor_loss_func(c, t, 1 / scale),
        lambda c, t, scale: losses.soft_nearest_neighbor_loss_func(c, t, 1 / scale, "cosine"),
        lambda c, t, scale: losses.uniformity_loss_func(c, scale),
    ],
)
def test_huge_scales_do_not_overflow(loss: Any) -> None:
    x, y, targets = make()
    cosine = cosines(x, y).requires_grad_()
    found = loss(cosine, targets, scale=1e8)
    assert found.isfinite()
    assert torch.autograd.grad(found, cosine)[0].isfinite().all()
