"""Which criterion a loss takes, by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.losses import LOSSES
from solo_ext.methods.metric_criteria import (
    Criterion,
    LabelCriterion,
    NoiseCriterion,
    OfCritic,
    OfMargins,
    OfModule,
    OfPairs,
    OfProxies,
    OfScaledViews,
    OfTriplets,
    OfViews,
    PairCriterion,
)

PML = "pml/"
"""Before the class of pytorch-metric-learning that a config names."""
KEY = "method_kwargs.loss"

_TENSORS: dict[tuple[str, ...], type[Criterion]] = {
    ("x", "targets"): LabelCriterion,
    ("embeddings", "labels"): LabelCriterion,
    ("z1", "z2"): OfViews,
    ("anchor", "positive", "negative"): OfTriplets,
    ("anchor", "positive"): OfViews,
    ("image", "text", "logit_scale"): OfScaledViews,
    ("x", "y", "same"): OfPairs,
    ("x", "y"): OfViews,
    ("x",): PairCriterion,
    ("cosine", "target"): OfMargins,
    ("data_logits", "noise_logits"): NoiseCriterion,
    ("query", "context", "weight"): OfCritic,
}
"""Criteria by the first arguments of the loss; longer ones before those that they begin with."""


def kind_of(name: str) -> tuple[type[Criterion], int]:
    """The criterion for a loss, and how many tensors it takes.

    Args:
        name: of a registered loss, or ``pml/`` and a class of pytorch-metric-learning.

    Raises:
        ConfigError: it is unknown, or compares with something that a batch has not.
    """
    if name.startswith(PML):
        takes = inspect.signature(_pml_class(name).__init__).parameters
        return (OfProxies if "num_classes" in takes else OfModule), 2
    if name not in LOSSES:
        raise ConfigError(KEY, name, "unknown loss", nearest(name, metric_losses()))
    names = tuple(inspect.signature(LOSSES[name].target).parameters)
    for tensors, kind in _TENSORS.items():
        if names[: len(tensors)] == tensors:
            return kind, len(tensors)
    raise ConfigError(
        KEY,
        name,
        f"it takes {', '.join(names)}, which is the business of a method of its own",
        f"choose one of {', '.join(metric_losses())}",
    )


def metric_losses() -> list[str]:
    """Names of the registered losses that the method ``metric`` can train."""
    found = []
    for name in LOSSES:
        names = tuple(inspect.signature(LOSSES[name].target).parameters)
        if any(names[: len(tensors)] == tensors for tensors in _TENSORS):
            found.append(name)
    return found


def normalizes(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the length of the embeddings is lost on a loss.

    Args:
        name: as :func:`kind_of` takes it; of losses that are not ours only what a criterion does
            before them is known.
        settings: hyper-parameters of the loss.
    """
    kind, tensors = kind_of(name)
    if name.startswith(PML):
        return False
    parameters = list(inspect.signature(LOSSES[name].target).parameters)
    if kind in (NoiseCriterion, OfMargins):
        return "feature_norm" not in parameters
    if LOSSES[name].origin != "solo_ext":
        return False
    within = kind is OfScaledViews or parameters[:tensors] == ["z1", "z2"]
    return within or settings.get("distance") == "cosine"


def check_loss_kwargs(name: str, given: Mapping[str, Any]) -> None:
    """Refuses hyper-parameters that the loss does not take, or not with this value.

    Raises:
        ConfigError: naming the first, or with what the loss has to say.
    """
    kind, tensors = kind_of(name)
    if name.startswith(PML):
        allowed = list(inspect.signature(_pml_class(name).__init__).parameters)[1:]
    else:
        allowed = list(inspect.signature(LOSSES[name].target).parameters)[tensors:]
    allowed = [a for a in allowed if a not in ("feature_norm", "kwargs")]
    # What the criterion takes in the loss's place.
    allowed += {NoiseCriterion: ["temperature"], OfScaledViews: ["logit_scale"]}.get(kind, [])
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"method_kwargs.loss_kwargs.{key}",
                given[key],
                f"{name} takes no such argument",
                (nearest(key, allowed) if allowed else "it takes none")
                + "; those of a config go with ~method_kwargs.loss_kwargs",
            )
    _try(name, given)


def _try(name: str, given: Mapping[str, Any]) -> None:
    """Finds out whether a loss takes these values, on two images."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            sizes = {"num_large": 2, "num_classes": 2, "dim": 2}
            criterion = build_criterion(name, given, mining="hard", **sizes)
            # Others' losses may want more of a batch; on several processes one may be alone here.
            ours = name in LOSSES and LOSSES[name].origin == "solo_ext"
            if ours and distributed.world_size() == 1:
                criterion([torch.eye(2)] * 2, torch.arange(2))
    except (TypeError, ValueError) as error:
        problem, _, remedy = str(error).partition(": ")
        raise ConfigError(
            "method_kwargs.loss_kwargs", dict(given), problem, remedy or f"see {name}"
        ) from None


def build_criterion(
    name: str, given: Mapping[str, Any], *, num_large: int, num_classes: int, dim: int, mining: str
) -> Criterion:
    """The criterion of a loss, with the heads that it learns.

    Args:
        name: as :func:`kind_of` takes it.
        given: hyper-parameters of the loss.
        num_large: large crops.
        num_classes: C, for losses that have weights per class.
        dim: D of the embeddings.
        mining: of triplets.

    Raises:
        ConfigError: as :func:`kind_of`.
    """
    kind, _ = kind_of(name)
    if name.startswith(PML):
        return kind(_pml_loss(name, given, num_classes, dim), num_large)
    target, given = LOSSES[name].target, dict(given)
    if kind is NoiseCriterion:
        return NoiseCriterion(target, num_large, given.pop("temperature", 0.2))
    if kind is OfScaledViews:
        return OfScaledViews(target, num_large, given.pop("logit_scale", None))

    def loss(*tensors: Tensor, **more: Tensor) -> Tensor:
        return target(*tensors, **given, **more)

    if kind is OfTriplets:
        return OfTriplets(loss, num_large, mining)
    if kind is OfMargins:
        takes_norm = "feature_norm" in inspect.signature(target).parameters
        return OfMargins(loss, num_large, num_classes, dim, takes_norm)
    if kind is OfCritic:
        return OfCritic(loss, num_large, dim)
    criterion = kind(loss, num_large)
    # A penalty on the length of embeddings: the loss of N pairs compares dot products.
    criterion.takes_raw = "l2_reg" in inspect.signature(target).parameters
    return criterion


def _pml_class(name: str) -> type[Any]:
    try:
        losses = importlib.import_module("pytorch_metric_learning.losses")
    except ImportError:
        raise ConfigError(
            KEY,
            name,
            "pytorch-metric-learning is not installed",
            "install the extra: pip install 'solo-ext[metric]'",
        ) from None
    wanted = name.removeprefix(PML)
    known = [n for n in dir(losses) if n.endswith("Loss")]
    if wanted not in known:
        raise ConfigError(
            KEY,
            name,
            "pytorch-metric-learning has no such loss",
            nearest(wanted, known),
        )
    return getattr(losses, wanted)  # type: ignore[no-any-return]


def _pml_loss(name: str, given: Mapping[str, Any], num_classes: int, dim: int) -> nn.Module:
    made = _pml_class(name)
    takes = inspect.signature(made.__init__).parameters
    sizes = {"num_classes": num_classes, "embedding_size": dim}
    needed = {k: v for k, v in sizes.items() if k in takes}
    return made(**{**needed, **given})  # type: ignore[no-any-return]
