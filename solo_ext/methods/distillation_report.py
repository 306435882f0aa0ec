"""What distillation, and ProtoCPC without a teacher, say of their settings when training starts."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig

from solo_ext.methods.distillation_kwargs import DistillationKwargs
from solo_ext.methods.negatives import idle_in_negatives, report_mixing
from solo_ext.methods.prototype_kwargs import PrototypeKwargs
from solo_ext.methods.registry import logger
from solo_ext.methods.settings_report import (
    idle_in_projector,
    warn_of_idle_settings,
    warn_of_the_floor,
)


def report_seed(cfg: DictConfig, kwargs_type: type[DistillationKwargs], dim: int) -> None:
    """Says what of SEED's settings will not do what a user may think.

    Args:
        cfg: the config.
        kwargs_type: the dataclass of its ``method_kwargs``.
        dim: D of the embeddings.
    """
    kwargs = cfg.method_kwargs
    idle = _idle_in_head(kwargs) | _idle_in_similarities(kwargs)
    if not cfg.data.num_small_crops:
        idle |= dict.fromkeys(("small_crop_target", "small_weight"), "there are no small crops")
    warn_of_idle_settings(cfg, kwargs_type, idle)
    if kwargs.loss == "seed":
        _warn_of_info_nce(kwargs)
    if kwargs.loss == "contrastive":
        warn_of_the_floor(
            "method_kwargs",
            kwargs.tau_plus,
            kwargs.beta,
            kwargs.student_temperature,
            dim,
            watch="train_clamped_fraction",
        )
        # The negatives are the teacher's embeddings of one crop at a time.
        report_mixing(cfg, all_crops=False)


def report_protoseed(cfg: DictConfig, kwargs_type: type[DistillationKwargs]) -> None:
    """Says what of ProtoSEED's settings will not do what a user may think.

    Args:
        cfg: the config.
        kwargs_type: the dataclass of its ``method_kwargs``.
    """
    kwargs = cfg.method_kwargs
    warn_of_idle_settings(cfg, kwargs_type, _idle_in_head(kwargs) | _idle_in_assignments(kwargs))
    _warn_of_a_flat_prior(kwargs)


def report_protocpc(cfg: DictConfig, kwargs_type: type[PrototypeKwargs]) -> None:
    """Says what of ProtoCPC's settings will not do what a user may think.

    Args:
        cfg: the config.
        kwargs_type: the dataclass of its ``method_kwargs``.
    """
    kwargs = cfg.method_kwargs
    warn_of_idle_settings(
        cfg, kwargs_type, idle_in_projector(kwargs) | _idle_in_assignments(kwargs)
    )
    _warn_of_a_flat_prior(kwargs)


def _idle_in_head(kwargs: Any) -> dict[str, str]:
    if kwargs.head == "mlp":
        return idle_in_projector(kwargs, batch_norm="head_batch_norm")
    return dict.fromkeys(
        ("proj_hidden_dim", "proj_layers"), "head=teacher has the layers of the teacher's head"
    )


def _idle_in_similarities(kwargs: Any) -> dict[str, str]:
    if kwargs.loss == "contrastive":
        return idle_in_negatives(kwargs)
    # What else there is of negatives has been refused.
    of_negatives = ("negatives", "detach_weights", "mixing")
    idle = dict.fromkeys(of_negatives, f"loss={kwargs.loss} has no negatives")
    if kwargs.loss == "regression":
        idle["queue_size"] = "loss=regression has no queue"
        idle["student_temperature"] = "loss=regression has no temperature"
    return idle


def _idle_in_assignments(kwargs: Any) -> dict[str, str]:
    idle = {}
    if kwargs.assignment == "softmax":
        idle["sinkhorn_iterations"] = "assignment=softmax does not iterate"
    if kwargs.loss == "ce":
        idle |= dict.fromkeys(("prior_momentum", "prior_order"), "loss=ce has no prior")
    return idle


def _warn_of_info_nce(kwargs: Any) -> None:
    # Of a queue whose every row is as near as another photograph of the same object can be.
    shared = kwargs.queue_size * math.exp(-0.05 / kwargs.teacher_temperature)
    if shared < 0.01:
        logger.warning(
            f"method_kwargs.teacher_temperature={kwargs.teacher_temperature} puts the whole target "
            "on the image itself: the loss is InfoNCE with the teacher's embedding as the positive "
            "(watch train_target_own); the paper has 0.01"
        )


def _warn_of_a_flat_prior(kwargs: Any) -> None:
    if kwargs.prior_momentum == 1 and kwargs.loss == "protocpc":
        logger.warning(
            "method_kwargs.prior_momentum=1: the prior stays flat and the loss is cross-entropy"
        )
