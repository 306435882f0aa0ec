"""Debiased and hard-negative losses of a batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import EXACT, Case, Goal, Setup, peer, relative
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.losses.contrastive import (
    batch_of_views,
    debiased_loss_func,
    hard_negative_loss_func,
    nt_xent_loss_func,
    plain_contrastive,
)

DIM, TEMPERATURE, TAU, BETA = 128, 0.5, 0.1, 1.0


def negatives_by_rows(count: int, device: torch.device) -> Tensor:
    """(2N, 2N), whether a column is a negative; N rows filled one by one, as both codes do."""
    size = count // 2
    negative = torch.ones(size, count, dtype=torch.bool)
    for row in range(size):
        negative[row, row] = False
        negative[row, row + size] = False
    return torch.cat((negative, negative)).to(device)


def plain_estimate(z1: Tensor, z2: Tensor, beta: float) -> Tensor:
    """Debiased, and with ``beta`` hard negatives, in the manner of the authors' code.

    Similarities, a mask of own columns, exponentials, on the (2N, 2N) matrix.
    """
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    rows = torch.cat((z1, z2))
    count = len(rows)
    similarity = torch.exp(rows @ rows.T / TEMPERATURE)
    negative = similarity.masked_select(negatives_by_rows(count, rows.device)).view(count, -1)
    positive = torch.exp((z1 * z2).sum(1) / TEMPERATURE)
    positive = torch.cat((positive, positive))
    if beta:
        weights = (beta * negative.log()).exp()
        mass = (weights * negative).sum(1) / weights.mean(1)
    else:
        mass = negative.sum(1)
    size = count - 2
    estimate = (mass - TAU * size * positive) / (1 - TAU)
    estimate = estimate.clamp(min=size * math.exp(-1 / TEMPERATURE))
    return -torch.log(positive / (positive + estimate)).mean()


def formula(z1: Tensor, z2: Tensor, beta: float) -> Tensor:
    """The plain form of the same."""
    return plain_contrastive(
        *batch_of_views((z1, z2)), temperature=TEMPERATURE, tau_plus=TAU, beta=beta
    )


def plain_nt_xent(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent as a cross-entropy over the (2N, 2N) matrix."""
    rows = F.normalize(torch.cat((z1, z2)), dim=1)
    logits = (rows @ rows.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    other = torch.arange(len(rows), device=rows.device).roll(len(z1))
    return F.cross_entropy(logits, other)


def two_views(effort: Effort, size: int) -> list[Tensor]:
    """Embeddings of two views, neither unit rows nor independent."""
    z1, z2 = (torch.randn(size, DIM, device=effort.device) for _ in range(2))
    return [z1.requires_grad_(), (z1.detach() + z2).requires_grad_()]


def setup(effort: Effort, rows: int) -> Setup:
    """Variants with ``rows`` embeddings, two of each image."""
    size = effort.size(rows // 2)
    views = two_views(effort, size)
    theirs = host.load().solo.losses.simclr_loss_func
    by_ids = "indexes" in inspect.signature(theirs).parameters
    ids = torch.arange(size, device=effort.device).repeat(2)

    def simclr() -> Tensor:
        if by_ids:
            return theirs(torch.cat(views), ids, temperature=TEMPERATURE)  # type: ignore[no-any-return]
        return theirs(*views, temperature=TEMPERATURE)  # type: ignore[no-any-return]

    def gradient(loss: Callable[..., Tensor], *args: Any) -> Tensor:
        return torch.cat(torch.autograd.grad(loss(*args), views))

    def lightly(module: Any) -> Work:
        return partial(gradient, module.NTXentLoss(temperature=TEMPERATURE), *views)

    return Setup(
        {
            "ours": lambda: gradient(debiased_loss_func, *views, TEMPERATURE, TAU),
            "hard negatives": lambda: gradient(
                hard_negative_loss_func, *views, TEMPERATURE, TAU, BETA
            ),
            "NT-Xent": lambda: gradient(nt_xent_loss_func, *views, TEMPERATURE),
            "plain NT-Xent": lambda: gradient(plain_nt_xent, *views),
            "plain debiased": lambda: gradient(plain_estimate, *views, 0.0),
            "plain hard": lambda: gradient(plain_estimate, *views, BETA),
            "plain debiased, mask at once": lambda: gradient(formula, *views, 0.0),
            "plain hard, mask at once": lambda: gradient(formula, *views, BETA),
            "solo-learn SimCLR": lambda: gradient(simclr),
            "lightly NT-Xent": peer("lightly.loss", lightly),
        },
        relative,
    )


HARD = "hard negatives"


def goals(debiased: float, hard: float, others: float | None, lean: float, gpu: float) -> Any:
    """The targets at one size."""
    either = (
        ()
        if others is None
        else (
            Goal("solo-learn SimCLR", others),
            Goal("solo-learn SimCLR", others, ours=HARD),
            Goal("lightly NT-Xent", others),
            Goal("lightly NT-Xent", others, ours=HARD),
        )
    )
    return (
        Goal("plain debiased", debiased, lean, most_difference=EXACT),
        Goal("plain hard", hard, lean, ours=HARD, most_difference=EXACT),
        Goal("plain debiased, mask at once", 0, most_launches=49),
        Goal("plain hard, mask at once", 0, ours=HARD, most_launches=60),
        *either,
        Goal("solo-learn SimCLR", 0, ours="NT-Xent", most_difference=EXACT),
        Goal("plain debiased", gpu, device="cuda"),
        Goal("plain hard", gpu, ours=HARD, device="cuda"),
    )


CASES = (
    Case("in-batch, 2N 512", partial(setup, rows=512), goals(1.4, 1.8, 1.8, 1.3, 3.0)),
    Case("in-batch, 2N 4,096", partial(setup, rows=4096), goals(2.1, 3.6, 2.1, 12, 5.0)),
)
