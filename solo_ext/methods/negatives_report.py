"""What methods with negatives say of the settings of these."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from solo_ext.core import distributed
from solo_ext.methods.registry import logger


def mixes(kwargs: Any) -> bool:
    """Whether synthetic negatives are asked for."""
    return bool(kwargs.mixing.num_pair_mixes + kwargs.mixing.num_query_mixes)


def idle_in_negatives(kwargs: Any) -> dict[str, str]:
    """Settings of queue, weights and mixtures where there are none, and why they are idle."""
    idle = {}
    if kwargs.negatives == "batch":
        idle["queue_size"] = "negatives=batch has no queue"
    if not kwargs.beta:
        idle["detach_weights"] = "beta=0 has no weights"
    if not mixes(kwargs):
        mining = ("mixing.num_hard", "mixing.warmup_epochs")
        idle |= dict.fromkeys(mining, "no mixtures are asked for")
    return idle


def report_mixing(cfg: DictConfig, all_crops: bool) -> None:
    """Warns of mixtures that will never be made, and of mining that leaves no negative out.

    Args:
        cfg: the config, which asks for mixtures.
        all_crops: whether an anchor meets every crop of the other images of a batch, or one of
            each.
    """
    kwargs = cfg.method_kwargs
    if kwargs.mixing.warmup_epochs >= cfg.max_epochs:
        logger.warning(
            f"method_kwargs.mixing.warmup_epochs={kwargs.mixing.warmup_epochs} of "
            f"max_epochs={cfg.max_epochs}: no negatives will ever be mixed"
        )
        return
    if kwargs.negatives != "batch":
        return
    offered = cfg.optimizer.batch_size * distributed.world_size() - 1
    if all_crops:
        offered *= cfg.data.num_large_crops + cfg.data.num_small_crops
    if kwargs.mixing.num_hard > offered:
        logger.warning(
            f"method_kwargs.mixing.num_hard={kwargs.mixing.num_hard}: an anchor has {offered} "
            "negatives in the batch, all of which are mined; take fewer, a larger batch or "
            "negatives=queue"
        )
