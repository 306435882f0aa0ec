"""Embeddings for methods, what they log, and what steps should have left, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.config.check import common_config
from solo_ext.data.transforms import eval_transform, fixed_view
from solo_ext.data.views import FixedViews
from tests.methods.contrastive_ranks import DIM


def features(count: int, rows: int = 4) -> list[Tensor]:
    """Embeddings with gradient; views of the same images are alike."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, DIM, generator=generator)
    noise = torch.randn(count, rows, DIM, generator=generator)
    return [(images + x).requires_grad_() for x in noise]


def gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a loss, the graph kept."""
    return list(torch.autograd.grad(loss, inputs, retain_graph=True))


def logged_by(method: Any) -> dict[str, Tensor]:
    """What a method will log, without a trainer."""
    logged: dict[str, Tensor] = {}
    method.log_dict = lambda metrics, **_: logged.update(metrics)
    return logged


def embeddings(count: int, seed: int = 1, rows: int = 6) -> list[Tensor]:
    """Random embeddings (rows, DIM)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, DIM, generator=generator) for _ in range(count)]


def ring(written: Tensor, size: int) -> Tensor:
    """Rows written one after the other, around a table."""
    table = written.new_zeros((size, *written.shape[1:]))
    for place, row in enumerate(written):
        table[place % size] = row
    return table


@torch.no_grad()
def embedded(method: Any, images: Any) -> Tensor:
    """Unit embeddings of all images, one at a time, by the networks of a method's keys."""
    prefix = "momentum_" if hasattr(method, "momentum_backbone") else ""
    networks = [getattr(method, f"{prefix}{name}") for name in ("backbone", "projector")]
    side, statistics = fixed_view(common_config(method.cfg))
    views = FixedViews(images, eval_transform(side, *statistics))
    for network in networks:
        network.eval()
    rows = [networks[1](networks[0](views[i][0].unsqueeze(0))) for i in range(len(views))]
    for network in networks:
        network.train()
    return F.normalize(torch.cat(rows), dim=1)


def assert_nearest(features: Tensor, means: Tensor, ids: Tensor) -> None:
    """Every sample is assigned to its nearest mean."""
    distances = torch.cdist(features, means)
    chosen = distances.gather(1, ids.long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, distances.amin(1), atol=1e-4, rtol=1e-4)
