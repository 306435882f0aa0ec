"""Optimisers and learning-rate schedules for solo-learn 1.0.2, from timm and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from timm.optim.lars import Lars
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

Group = dict[str, Any]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "lars": Lars,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def configure_optimizers(module: Any) -> Any:
    """``configure_optimizers`` of solo-learn main, for a method on 1.0.2.

    It differs from upstream's: parameters with ``static_lr`` keep their rate by a schedule of plain
    numbers, so that checkpoints can be loaded; LARS is timm's, which runs Lightning's closure
    before it scales gradients; the warm-up is computed in closed form.

    >>> from solo_ext.host.release_1_0_2.base import BaseMethod
    >>> from solo_ext.methods.registry import example_config
    >>> optimizer = configure_optimizers(BaseMethod(example_config("mine")))
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('backbone', 0.1), ('classifier', 0.1)]
    """
    groups = [dict(group, params=list(group["params"])) for group in module.learnable_params]
    if module.exclude_bias_n_norm_wd:
        groups = split_by_dimension(groups, weight_decay=0.0)
    kwargs = dict(module.extra_optimizer_args)
    if module.optimizer == "lars":
        groups, kwargs = _lars_arguments(groups, kwargs)
    static = [bool(group.pop("static_lr", False)) for group in groups]
    optimizer = OPTIMIZERS[module.optimizer](
        groups,
        lr=module.lr,  # type: ignore[call-arg]
        weight_decay=module.weight_decay,
        **kwargs,
    )
    # As upstream, give static groups the base rate and not their own.
    for group, fixed in zip(optimizer.param_groups, static, strict=True):
        if fixed:
            group["lr"] = module.lr
    if module.scheduler == "none":
        return optimizer
    return [optimizer], [_schedule(module, optimizer, static)]


def split_by_dimension(groups: Iterable[Group], **vectors: Any) -> list[Group]:
    """Splits groups into matrices and vectors (biases, norms); ``vectors`` updates the latter.

    >>> layer = torch.nn.Linear(4, 3)
    >>> groups = split_by_dimension([{"params": list(layer.parameters())}], weight_decay=0.0)
    >>> [([tuple(p.shape) for p in g["params"]], g.get("weight_decay")) for g in groups]
    [([(3, 4)], None), ([(3,)], 0.0)]
    """
    out: list[Group] = []
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim > 1]
        rest = [p for p in group["params"] if p.ndim <= 1]
        if matrices:
            out.append({**group, "params": matrices})
        if rest:
            name = {"name": f"{group['name']}_no_decay"} if "name" in group else {}
            out.append({**group, **name, **vectors, "params": rest})
    return out


def _lars_arguments(groups: list[Group], kwargs: dict[str, Any]) -> tuple[list[Group], Group]:
    """solo-learn's names for timm's LARS: excluded vectors get neither decay nor adaptation."""
    kwargs = {"momentum": 0.9, **kwargs}
    kwargs["trust_coeff"] = kwargs.pop("eta", 1e-3)
    kwargs["trust_clip"] = kwargs.pop("clip_lr", False)
    if kwargs.pop("exclude_bias_n_norm", False):
        groups = split_by_dimension(groups, weight_decay=0.0, always_adapt=False)
    return [{"always_adapt": True, **group} for group in groups], kwargs


def _schedule(module: Any, optimizer: torch.optim.Optimizer, static: list[bool]) -> Any:
    per_step = module.scheduler_interval == "step"
    if module.scheduler == "warmup_cosine":
        total = module.trainer.estimated_stepping_batches if per_step else module.max_epochs
        warmup = module.warmup_epochs * total / module.max_epochs
        rate: Callable[[int, float], float] = partial(
            warmup_cosine,
            warmup=warmup,
            total=total,
            start=module.warmup_start_lr,
            end=module.min_lr,
        )
        # As upstream, static groups are held from the second step; the first has the warm-up rate.
        first = module.warmup_start_lr if module.warmup_epochs > 0 else module.lr
        factors = [
            _static(first / module.lr) if fixed else _factor(rate, group["lr"])
            for group, fixed in zip(optimizer.param_groups, static, strict=True)
        ]
        scheduler = LambdaLR(optimizer, factors)
        return {"scheduler": scheduler, "interval": module.scheduler_interval, "frequency": 1}
    if not any(static):
        return MultiStepLR(optimizer, list(module.lr_decay_steps))
    decayed = partial(_decayed, list(module.lr_decay_steps))
    return LambdaLR(optimizer, [_static(1.0) if fixed else decayed for fixed in static])


def warmup_cosine(
    step: int, base: float, *, warmup: float, total: float, start: float, end: float
) -> float:
    """Learning rate after ``step`` of ``total`` steps (or epochs).

    ``warmup`` steps rise linearly from ``start`` to ``base``, half a cosine falls to ``end``.

    >>> rate = partial(warmup_cosine, base=1.0, warmup=2, total=6, start=0.1, end=0.0)
    >>> [round(rate(step), 3) for step in range(6)]
    [0.1, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        # Bound the fraction: with a fractional warm-up it would end above the base rate.
        return start + (base - start) * min(step / max(warmup - 1, 1), 1.0)
    progress = (step - warmup) / max(total - warmup, 1)
    return end + 0.5 * (base - end) * (1 + math.cos(math.pi * progress))


def _factor(rate: Callable[[int, float], float], base: float) -> Callable[[int], float]:
    return lambda step: rate(step, base) / base


def _static(first: float) -> Callable[[int], float]:
    return lambda step: 1.0 if step else first


def _decayed(milestones: list[int], step: int) -> float:
    return float(0.1 ** sum(step >= m for m in milestones))
