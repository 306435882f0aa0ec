"""Every loss on rows, precisions and devices that are out of the ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext import losses
from solo_ext.core.precision import (
    full_precision,
    full_precision_products,
    matmul_precision,
)
from solo_ext.losses.contrastive import (
    PLAIN,
    Mixing,
    NegativeEstimator,
    batch_of_views,
    contrastive,
)
from solo_ext.losses.mochi import draw_mixes

N, D = 6, 5
Loss = Callable[[list[Tensor], float], Tensor]
"""Of two views (N, 5) and unit rows (N, 5), as of a queue or prototypes, and a temperature."""
HARD = NegativeEstimator(0.1, 0.7)


DRAWN: dict[tuple[int, int, int, bool], Mixing] = {}
"""Drawn once: a graph that is compiled holds no generator."""


def mixing(anchors: Tensor, most: int, singles: int = 3) -> Mixing:
    key = len(anchors), most, singles, anchors.is_meta
    if key not in DRAWN:
        generator = None if anchors.is_meta else torch.Generator().manual_seed(0)
        # The same draws whatever the precision.
        DRAWN[key] = Mixing(most, draw_mixes(anchors.float(), most, 5, singles, generator))
    return DRAWN[key]


def mochi(x: list[Tensor], temperature: float, singles: int = 3) -> Tensor:
    made = mixing(x[0], min(3, len(x[2])), singles)
    return losses.mochi_loss_func(*x, temperature, made.num_hard, draws=made.draws)


def mixed_queue(x: list[Tensor], temperature: float) -> Tensor:
    with full_precision_products(x[0].device):
        query, positive = (F.normalize(row, dim=1) for row in full_precision(*x[:2]))
    settings: Any = {"estimator": HARD, "mixing": mixing(x[0], min(3, len(x[2])))}
    settings["temperature"] = temperature
    return contrastive(query, positive.unsqueeze(1), x[2].detach(), **settings).loss


def of_views(estimator: NegativeEstimator, mixes: bool = False) -> Loss:
    def loss(x: list[Tensor], temperature: float) -> Tensor:
        batch = batch_of_views(x)
        made = mixing(batch.anchors, 3) if mixes else None
        settings: Any = {"estimator": estimator, "mixing": made, "temperature": temperature}
        return contrastive(**batch._asdict(), **settings).loss

    return loss


def cosines(x: list[Tensor]) -> Tensor:
    """(N, 5) cosines of the first view with five directions that depend on the second."""
    with full_precision_products(x[0].device):
        rows, others = full_precision(*x[:2])
        weights = torch.eye(D, dtype=rows.dtype, device=rows.device) + others.mean(0)
        return F.linear(F.normalize(rows, dim=1), F.normalize(weights, dim=1))


def labels(x: list[Tensor]) -> Tensor:
    return torch.arange(len(x[0]), device=x[0].device) // 2 % D


def sphereface(x: list[Tensor]) -> Tensor:
    x = list(full_precision(*x))
    norms = torch.linalg.vector_norm(x[0], dim=1)
    return losses.sphereface_loss_func(cosines(x), labels(x), feature_norm=norms)


def proto_nce(x: list[Tensor], temperature: float) -> Tensor:
    phi = torch.full((len(x[2]),), temperature, device=x[0].device)
    return losses.proto_nce_loss_func(x[0], x[2].detach(), phi, labels(x), labels(x), "merge")


def protocpc_step(x: list[Tensor], temperature: float) -> Tensor:
    rows, prior = x[2].detach(), torch.ones(len(x[2]), device=x[0].device)
    settings: Any = {"student_temperature": temperature, "teacher_temperature": temperature}
    return losses.protocpc_step(x[0][None], x[1][None], rows, prior, **settings).loss


IN_BATCH: dict[str, Loss] = {
    "nt_xent": lambda x, t: losses.nt_xent_loss_func(*x[:2], t),
    "debiased": lambda x, t: losses.debiased_loss_func(*x[:2], t, 0.1),
    "hard": lambda x, t: losses.hard_negative_loss_func(*x[:2], t, 0.1, 1.0),
    "hard, detached": lambda x, t: losses.hard_negative_loss_func(*x[:2], t, 0.1, 1.0, True),
    "very hard": lambda x, t: losses.hard_negative_loss_func(*x[:2], t, 0.1, 200.0),
    "row of nnclr": lambda x, t: losses.nnclr_symmetric_loss_func(*x[:2], t, False),
    "nnclr": lambda x, t: losses.nnclr_symmetric_loss_func(*x[:2], t),
    "three views": of_views(PLAIN),
    "three views, hard": of_views(HARD),
    "three views, mixed": of_views(HARD, mixes=True),
}
BY_QUEUE: dict[str, Loss] = {
    "info_nce": lambda x, t: losses.info_nce_loss_func(*x[:2], x[2].detach(), t),
    "info_nce, queue learns": lambda x, t: losses.info_nce_loss_func(*x, t),
    "mochi": lambda x, t: mochi([*x[:2], x[2].detach()], t),
    "mochi, queue learns": mochi,
    "mochi, hard": mixed_queue,
    "mochi, pairs": lambda x, t: mochi([*x[:2], x[2].detach()], t, singles=0),
}
METRIC: dict[str, Loss] = {
    "alignment": lambda x, _: losses.alignment_loss_func(*x[:2]),
    "alignment 1": lambda x, _: losses.alignment_loss_func(*x[:2], 1),
    "arcface": lambda x, t: losses.arcface_loss_func(cosines(x), labels(x), 1 / t),
    "arcface plain": lambda x, _: losses.arcface_loss_func(cosines(x), labels(x), monotone=False),
    "bilinear": lambda x, t: losses.bilinear_info_nce_loss_func(
        *x[:2], torch.eye(D, device=x[0].device), t
    ),
    "clip": lambda x, t: losses.clip_loss_func(*x[:2], 1 / t),
    "contrastive": lambda x, _: losses.contrastive_loss_func(*x[:2], labels(x) == 1),
    "cosface": lambda x, t: losses.cosface_loss_func(cosines(x), labels(x), 1 / t),
    "lifted": lambda x, _: losses.lifted_structured_loss_func(x[0], labels(x)),
    "lifted max": lambda x, _: losses.lifted_structured_loss_func(x[0], labels(x), smooth=False),
    "n_pair": lambda x, _: losses.n_pair_loss_func(*x[:2], 0.1),
    "nce": lambda x, _: losses.nce_loss_func(x[0][:, 0], x[1]),
    "soft nearest": lambda x, t: losses.soft_nearest_neighbor_loss_func(x[0], labels(x), t),
    "soft nearest cosine": lambda x, t: losses.soft_nearest_neighbor_loss_func(
        x[0], labels(x), t, "cosine"
    ),
    "sphereface": lambda x, _: sphereface(x),
    "triplet": lambda x, _: losses.triplet_loss_func(*x),
    "triplet plain": lambda x, _: losses.triplet_loss_func(*x, squared=False),
    "uniformity": lambda x, t: losses.uniformity_loss_func(x[0], 1 / t),
}
DISTILLATION: dict[str, Loss] = {
    "seed": lambda x, t: losses.seed_loss_func(*x[:2], x[2].detach(), 2 * t, t),
    "protocpc": lambda x, t: losses.protocpc_loss_func(
        x[0], x[1].float().softmax(1), x[2][0].detach().abs(), t
    ),
    "protocpc step": protocpc_step,
    "proto_nce": proto_nce,
}
LOSSES = IN_BATCH | BY_QUEUE | METRIC | DISTILLATION
EVERY = pytest.mark.parametrize("name", LOSSES)


def make(rows: int = N, dim: int = D, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Three views, similar row by row; the third of unit rows, as of a queue."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, rows, dim, generator=generator, dtype=torch.float64)
    views = [*(centres + 0.7 * noise)]
    return [3 * views[0].to(dtype), views[1].to(dtype), F.normalize(views[2], dim=1).to(dtype)]


def awkward() -> dict[str, list[Tensor]]:
    """Rows that a failing or starting network may give."""
    views = make()
    ones = F.normalize(torch.ones_like(views[0]), dim=1)
    zeros = torch.zeros_like(ones)
    first = torch.arange(N).unsqueeze(1) == 1
    return {
        "collapsed": [ones, ones, ones],
        "collapsed far": [1e3 * ones, 1e3 * ones, ones],
        "collapsed almost": [ones + 1e-7 * views[0], ones + 1e-7 * views[1], ones],
        "opposite": [ones, -ones, ones],
        "opposite queue": [ones, ones, -ones],
        "duplicate": [z[[0, 0, 2, 3, 0, 5]] for z in views],
        "views equal": [views[2]] * 3,
        "zero row": [torch.where(first, zeros, views[0]), *views[1:]],
        "zero in all": [torch.where(first, zeros, z) for z in views],
        "all zero": [zeros] * 3,
        "single": [z[:1] for z in views],
        "huge": [1e6 * views[0], 1e6 * views[1], views[2]],
        "tiny": [1e-30 * views[0], 1e-30 * views[1], views[2]],
    }


def gradients(loss: Tensor, x: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, x, materialize_grads=True))


def if_collapsed(name: str) -> float:
    """All samples are alike: the loss counts them."""
    negatives = {"three": 3 * N - 3, "mochi": N + 8, "info_": N, "nnclr": N - 1, "row o": N - 1}
    mixed = {"three views, mixed": 8, "mochi, pairs": -3}.get(name, 0)
    return math.log(1 + negatives.get(name[:5], 2 * N - 2) + mixed)


@EVERY
@pytest.mark.parametrize("case", awkward())
def test_awkward_rows_stay_finite(name: str, case: str) -> None:
    for dtype, temperature in ((torch.float32, 0.01), (torch.float64, 0.5)):
        x = [z.to(dtype).clone().requires_grad_() for z in awkward()[case]]
        # Finite all along the backward pass, else this mode, which users debug with, raises.
        with torch.autograd.set_detect_anomaly(True):
            loss = LOSSES[name](x, temperature)
            found = gradients(loss, x)
        assert loss.shape == ()
        assert loss.dtype == dtype
        assert loss.requires_grad
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in found)
        if name in IN_BATCH | BY_QUEUE:
            assert loss >= 0
            if case == "collapsed":
                assert loss.item() == pytest.approx(if_collapsed(name), rel=1e-3)
        if name in IN_BATCH and case == "single":
            assert loss.item() == 0
            assert not any(g.any() for g in found)


@pytest.mark.parametrize("name", BY_QUEUE)
def test_empty_queue_gives_zero_on_the_graph(name: str) -> None:
    query, positive, queue = make()
    x = [z.requires_grad_() for z in (query, positive, queue[:0])]
    mixes = name.startswith("mochi")
    loss = losses.mochi_loss_func(*x) if mixes else LOSSES[name](x, 0.2)
    assert loss.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, x[:2]))


@EVERY
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_single_precision_keeps_up(name: str, temperature: float) -> None:
    exact = [z.requires_grad_() for z in make(16)]
    single = [z.detach().float().requires_grad_() for z in exact]
    expected, found = (LOSSES[name](x, temperature) for x in (exact, single))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-4, abs=1e-6)
    for one, two in zip(gradients(found, single), gradients(expected, exact), strict=True):
        assert (one.double() - two).norm() <= 2e-3 * two.norm() + 1e-6


@EVERY
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_single_precision(name: str, half: torch.dtype) -> None:
    loss = LOSSES[name]
    halves = [z.to(half).requires_grad_() for z in make(dtype=torch.float32)]
    rounded = [z.detach().float().requires_grad_() for z in halves]
    for temperature in (0.01, 0.5):
        with torch.autocast("cpu", dtype=half):
            assert F.linear(rounded[0], rounded[1]).dtype == half, "autocast must be on"
            from_single, from_half = loss(rounded, temperature), loss(halves, temperature)
        # What is lost is what rounding the inputs loses, and nothing more.
        expected = loss(rounded, temperature)
        assert from_single.dtype == from_half.dtype == torch.float32
        assert torch.equal(from_single, expected)
        assert torch.equal(from_half, expected)
        wanted = gradients(expected, rounded)
        for found, one in zip(gradients(from_half, halves), wanted, strict=True):
            assert found.dtype == half
            assert torch.equal(found, one.to(half))


class OnMeta(TorchDispatchMode):
    """Refuses tensors of another device: a copy between devices waits for both."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            assert not isinstance(tensor, Tensor) or tensor.is_meta, func
        return out


@EVERY
@pytest.mark.parametrize("count", [1, N])
def test_runs_without_looking_at_values(name: str, count: int) -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    x = [torch.empty(count, D, device="meta", requires_grad=True) for _ in range(3)]
    with OnMeta():
        loss = LOSSES[name](x, 0.1)
        loss.backward()
    assert loss.is_meta
    assert loss.shape == ()
    assert x[0].grad is not None


class InFullPrecision(TorchDispatchMode):
    """Refuses products in TF32: beside a sum in fp32 they would make losses below zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in ("aten::mm", "aten::addmm", "aten::bmm", "aten::mv"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee", func
        return func(*args, **(kwargs or {}))


@EVERY
def test_products_are_fp32_whatever_the_setting(name: str) -> None:
    with matmul_precision("high"), InFullPrecision():
        LOSSES[name](make(dtype=torch.float32), 0.1)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"


FIXED = {"hard, detached", "mochi", "mochi, queue learns", "mochi, hard", "three views, mixed"}
"""Weights or mixtures are constants to their gradient."""


@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - FIXED))
def test_gradcheck(name: str, temperature: float) -> None:
    x = make(4 if name in METRIC else 3)
    constant = name in ("info_nce", "mochi, pairs")
    learn = 1 if name in DISTILLATION else 2 if constant else 3
    inputs, rest = [z.requires_grad_() for z in x[:learn]], x[learn:]
    assert torch.autograd.gradcheck(lambda *z: LOSSES[name]([*z, *rest], temperature), inputs)


ALIKE = {
    *("hard, detached", "very hard", "row of nnclr", "three views", "three views, hard"),
    *("info_nce, queue learns", "mochi, queue learns", "mochi, pairs", "alignment 1"),
    *("arcface plain", "triplet plain", "lifted max", "soft nearest cosine"),
}
"""Their operations are those of others; settings choose among them before anything is traced."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - ALIKE))
def test_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    x = [view.requires_grad_() for view in make()]
    loss = LOSSES[name]
    # Before, so that mixtures are drawn outside of the graph.
    expected = loss(x, 0.2)
    found = torch.compile(lambda x: loss(x, 0.2), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, x), gradients(expected, x))
