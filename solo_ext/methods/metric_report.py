"""What metric learning says of its settings when training starts."""

from __future__ import annotations

import inspect
from typing import Any

from omegaconf import DictConfig

from solo_ext.losses import LOSSES
from solo_ext.methods.e_step import warn_of_late_start
from solo_ext.methods.metric_criteria import OfTriplets
from solo_ext.methods.metric_kwargs import CLUSTERS, MetricKwargs
from solo_ext.methods.metric_losses import kind_of, normalizes
from solo_ext.methods.settings_report import (
    UNREAD_ALPHA,
    idle_in_projector,
    warn_of_idle_settings,
    warn_of_the_floor,
)


def report_settings(cfg: DictConfig) -> None:
    """Says what will not do what a user may think."""
    kwargs = cfg.method_kwargs
    loss = _loss_settings(kwargs)
    warn_of_idle_settings(cfg, MetricKwargs, _idle(kwargs, loss))
    if "tau_plus" in loss:
        warn_of_the_floor(
            "method_kwargs.loss_kwargs",
            loss["tau_plus"],
            loss.get("beta", 0.0),
            loss["temperature"],
            kwargs.proj_output_dim,
        )
    if kwargs.classes == "cluster":
        warn_of_late_start(cfg, kwargs.clusters, CLUSTERS)


def _loss_settings(kwargs: Any) -> dict[str, Any]:
    """Hyper-parameters of a loss of ours, its defaults filled in; of another's none."""
    if kwargs.loss not in LOSSES or LOSSES[kwargs.loss].origin != "solo_ext":
        return {}
    parameters = inspect.signature(LOSSES[kwargs.loss].target).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | dict(kwargs.loss_kwargs)


def _idle(kwargs: Any, loss: dict[str, Any]) -> dict[str, str]:
    idle = idle_in_projector(kwargs)
    if not issubclass(kind_of(kwargs.loss)[0], OfTriplets):
        idle["mining"] = f"{kwargs.loss} is not of triplets, which alone are mined"
    if kwargs.classes == "cluster":
        idle["clusters.alpha"] = UNREAD_ALPHA
    else:
        idle["clusters"] = f"classes={kwargs.classes} has no clusters"
    # True is what such a loss does, asked for or not.
    if kwargs.normalize is False and normalizes(kwargs.loss, loss):
        idle["normalize"] = f"{kwargs.loss} normalises by itself"
    if loss.get("detach_weights") and not loss["beta"]:
        idle["loss_kwargs.detach_weights"] = "beta=0 has no weights"
    return idle
