"""What the contrastive methods say of their settings when training starts."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from solo_ext.methods.contrastive_kwargs import CLUSTERS, ContrastiveKwargs
from solo_ext.methods.e_step import warn_of_late_start
from solo_ext.methods.negatives_report import idle_in_negatives, mixes, report_mixing
from solo_ext.methods.registry import has_indices, logger
from solo_ext.methods.settings_report import (
    UNREAD_ALPHA,
    idle_in_projector,
    warn_of_idle_settings,
    warn_of_the_floor,
)


def report_settings(
    cfg: DictConfig, kwargs_type: type[ContrastiveKwargs], num_samples: int | None
) -> None:
    """Says what will not do what a user may think.

    Args:
        cfg: the config.
        kwargs_type: the dataclass of its ``method_kwargs``.
        num_samples: of the training set, where a support set is to be compared with it.
    """
    kwargs = cfg.method_kwargs
    warn_of_idle_settings(cfg, kwargs_type, _idle(kwargs))
    warn_of_the_floor(
        "method_kwargs",
        kwargs.tau_plus,
        kwargs.beta,
        kwargs.temperature,
        kwargs.proj_output_dim,
        watch="train_clamped_fraction",
    )
    if kwargs.positives == "nearest_neighbor" and num_samples:
        _warn_of_own_neighbours(cfg, kwargs.support_set, num_samples)
    if kwargs.positives == "prototype":
        warn_of_late_start(cfg, kwargs.clusters, CLUSTERS)
    if mixes(kwargs):
        # Neighbours meet the predictions of one crop at a time.
        report_mixing(cfg, all_crops=kwargs.positives != "nearest_neighbor")


def _idle(kwargs: Any) -> dict[str, str]:
    positives, negatives = kwargs.positives, kwargs.negatives
    idle = idle_in_projector(kwargs)
    if positives == "prototype":
        idle["clusters.alpha"] = UNREAD_ALPHA
    else:
        idle["clusters"] = f"positives={positives} has no clusters"
    if positives != "nearest_neighbor":
        idle["support_set"] = f"positives={positives} has no support set"
    if (positives, negatives) != ("nearest_neighbor", "batch"):
        idle["symmetric"] = "read with positives=nearest_neighbor and negatives=batch"
    return idle | idle_in_negatives(kwargs)


def _warn_of_own_neighbours(cfg: DictConfig, settings: Any, num_samples: int) -> None:
    share = min(settings.size / num_samples, 1)
    if settings.exclude_own or share <= 0.5:
        return
    remedy = "take a smaller size"
    if has_indices(cfg):
        remedy = "take exclude_own: true or a smaller size (watch train_nn_own)"
    logger.warning(
        f"method_kwargs.support_set.size={settings.size} holds {share:.0%} of the {num_samples} "
        "training images: an image's nearest neighbour will mostly be its own earlier embedding; "
        f"{remedy}"
    )
