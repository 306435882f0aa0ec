"""Debiased and hard-negative losses of a batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operation import EXACT, Case, Form, Goal, Setup, of_losses
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.losses.contrastive import (
    batch_of_views,
    debiased_loss_func,
    hard_negative_loss_func,
    plain_contrastive,
)

DIM, TEMPERATURE, TAU, BETA = 128, 0.5, 0.1, 1.0


def plain(z1: Tensor, z2: Tensor, beta: float) -> Tensor:
    """Debiased, and with ``beta`` hard negatives, in the manner of the authors' code.

    Similarities, a mask of own columns that is filled row by row, and exponentials.
    """
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    rows, size = torch.cat((z1, z2)), len(z1)
    mask = torch.ones(size, 2 * size, dtype=torch.bool)
    for row in range(size):
        mask[row, row] = False
        mask[row, row + size] = False
    mask = torch.cat((mask, mask)).to(rows.device)
    negative = torch.exp(rows @ rows.T / TEMPERATURE).masked_select(mask).view(2 * size, -1)
    positive = torch.exp((z1 * z2).sum(1) / TEMPERATURE).repeat(2)
    mass, count = negative.sum(1), 2 * size - 2
    if beta:
        weights = (beta * negative.log()).exp()
        mass = (weights * negative).sum(1) / weights.mean(1)
    estimate = (mass - TAU * count * positive) / (1 - TAU)
    estimate = estimate.clamp(min=count * math.exp(-1 / TEMPERATURE))
    return -torch.log(positive / (positive + estimate)).mean()


def at_once(z1: Tensor, z2: Tensor, beta: float) -> Tensor:
    """The plain form of the same."""
    views = batch_of_views((z1, z2))
    return plain_contrastive(*views, temperature=TEMPERATURE, tau_plus=TAU, beta=beta)


def setup(effort: Effort, rows: int) -> Setup:
    """Variants with ``rows`` embeddings, two of each image."""
    size, device = effort.size(rows // 2), effort.device
    z1, z2 = (torch.randn(size, DIM, device=device) for _ in range(2))
    # Neither unit rows nor independent.
    views = z1.requires_grad_(), (z1.detach() + z2).requires_grad_()
    theirs = host.load().solo.losses.simclr_loss_func
    by_ids = "indexes" in inspect.signature(theirs).parameters
    ids = torch.arange(size, device=device).repeat(2)

    def simclr(*views: Tensor) -> Any:
        given = (torch.cat(views), ids) if by_ids else views
        return theirs(*given, temperature=TEMPERATURE)

    forms: dict[str, Form | str] = {
        "ours": partial(debiased_loss_func, temperature=TEMPERATURE, tau_plus=TAU),
        HARD: partial(hard_negative_loss_func, temperature=TEMPERATURE, tau_plus=TAU, beta=BETA),
        "plain debiased": partial(plain, beta=0.0),
        "plain hard": partial(plain, beta=BETA),
        "plain debiased, mask at once": partial(at_once, beta=0.0),
        "plain hard, mask at once": partial(at_once, beta=BETA),
        "solo-learn SimCLR": simclr,
    }
    return of_losses(views, forms)


HARD = "hard negatives"


def goals(debiased: float, hard: float, other: float, lean: float, gpu: float) -> Iterator[Goal]:
    """The targets at one size."""
    for name, form, faster, launches in (
        ("ours", "plain debiased", debiased, 49),
        (HARD, "plain hard", hard, 60),
    ):
        yield Goal(form, faster, lean, name, most_difference=EXACT)
        yield Goal(f"{form}, mask at once", 0, ours=name, most_launches=launches)
        yield Goal("solo-learn SimCLR", other, ours=name)
        yield Goal(form, gpu, ours=name, device="cuda")


CASES = (
    Case("in-batch, 2N 512", partial(setup, rows=512), (*goals(1.4, 1.8, 1.8, 1.3, 3.0),)),
    Case("in-batch, 2N 4,096", partial(setup, rows=4096), (*goals(2.1, 3.6, 2.1, 12, 5.0),)),
)
