"""What methods do with negatives: MoCHi's mixtures of them, metrics, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeInt, PositiveInt, Section
from solo_ext.losses.contrastive import ContrastiveTerms
from solo_ext.losses.mochi import Mixing, draw_mixes
from solo_ext.memory.features import FeatureQueue
from solo_ext.methods.registry import logger


class MixingKwargs(Section):
    """``method_kwargs.mixing``: MoCHi's synthetic negatives; none by default.

    Attributes:
        num_hard: how many of the negatives most similar to the query are mixed; null: 1,024, but
            at most a sixteenth of the queue.
        num_pair_mixes: mixtures of two of them.
        num_query_mixes: mixtures of one with the query.
        warmup_epochs: epochs without mixtures.
    """

    num_hard: PositiveInt | None = None
    num_pair_mixes: NonNegativeInt = 0
    num_query_mixes: NonNegativeInt = 0
    warmup_epochs: NonNegativeInt = 10


class DrawnMixing:
    """Draws MoCHi's mixtures: anew at every step and rank, and reproducibly when a run resumes.

    Args:
        settings: :class:`MixingKwargs`.

    Example:
        >>> mixing = DrawnMixing(MixingKwargs(num_hard=4, num_pair_mixes=6, warmup_epochs=2))
        >>> mixing.active(epoch=1), mixing.active(epoch=2)
        (False, True)
        >>> mixing.begin(seed=5, epoch=2, batch_idx=0)
        >>> mixing.draw(epoch=2, available=9, anchors=torch.zeros(3, 8)).draws.pair_indices.shape
        torch.Size([3, 6, 2])
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._state = 0

    def active(self, epoch: int) -> bool:
        """Whether negatives are mixed in an epoch."""
        settings = self._settings
        some = settings.num_pair_mixes + settings.num_query_mixes > 0
        return bool(some and epoch >= settings.warmup_epochs)

    def begin(self, seed: int, epoch: int, batch_idx: int) -> None:
        """Starts the draws of a step of the run with this seed."""
        self._state = mix(seed, distributed.rank(), epoch, batch_idx)

    def draw(self, epoch: int, available: int, anchors: Tensor) -> Mixing | None:
        """Draws for each anchor; ``None`` where nothing is mixed.

        Args:
            epoch: current one.
            available: negatives of an anchor.
            anchors: (N, D).
        """
        if not self.active(epoch):
            return None
        settings = self._settings
        generator = None
        if anchors.device.type != "meta":
            self._state = mix(self._state)
            generator = torch.Generator(anchors.device).manual_seed(self._state)
        # A small batch may have fewer negatives than `num_hard` asks for.
        mined = max(min(settings.num_hard, available), 1)
        counts = settings.num_pair_mixes, settings.num_query_mixes
        return Mixing(mined, draw_mixes(anchors, mined, *counts, generator), ranked=False)


def mixes(kwargs: Any) -> int:
    """Synthetic negatives of each anchor that ``method_kwargs`` ask for."""
    return int(kwargs.mixing.num_pair_mixes + kwargs.mixing.num_query_mixes)


def fill_num_hard(cfg: DictConfig) -> None:
    """Sets ``mixing.num_hard`` where mixtures are asked for without it.

    1,024 as the paper uses for ImageNet, but at most a sixteenth of the queue, which is the paper's
    ratio for ImageNet-100.

    Args:
        cfg: the config; ``queue_size`` is already set where there is a queue.
    """
    kwargs, mixing = cfg.method_kwargs, cfg.method_kwargs.mixing
    if mixing.num_hard is not None or not mixes(kwargs):
        return
    mixing.num_hard = 1024
    rows = kwargs.queue_size if kwargs.negatives == "queue" else None
    if rows is not None and rows // 16 < mixing.num_hard:
        mixing.num_hard = max(1, rows // 16)
        line = f"{cfg.method}: mixing.num_hard={mixing.num_hard} from queue_size={rows}"
        rank_zero_only(logger.info)(line)


def check_num_hard(kwargs: Any) -> None:
    """Refuses to mine more negatives than a queue has.

    Raises:
        ConfigError: with both numbers.
    """
    mined, rows = kwargs.mixing.num_hard, kwargs.queue_size
    if mixes(kwargs) and kwargs.negatives == "queue" and mined > rows:
        raise ConfigError(
            "method_kwargs.mixing.num_hard",
            mined,
            f"the queue has {rows} rows",
            f"allowed: up to {rows}",
        )


def idle_in_negatives(kwargs: Any) -> dict[str, str]:
    """Settings of queue, weights and mixtures that nothing reads, with the reason."""
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
    """Warns if no mixture will ever be made, or if mining would select every negative.

    Args:
        cfg: the config.
        all_crops: whether an anchor is compared with every crop of the other images of a batch,
            rather than with one crop of each.
    """
    kwargs, mixing = cfg.method_kwargs, cfg.method_kwargs.mixing
    if not mixes(kwargs):
        return
    if mixing.warmup_epochs >= cfg.max_epochs:
        logger.warning(
            f"method_kwargs.mixing.warmup_epochs={mixing.warmup_epochs} of "
            f"max_epochs={cfg.max_epochs}: no negatives will ever be mixed"
        )
        return
    if kwargs.negatives != "batch":
        return
    offered = cfg.optimizer.batch_size * distributed.world_size() - 1
    if all_crops:
        offered *= cfg.data.num_large_crops + cfg.data.num_small_crops
    if mixing.num_hard > offered:
        logger.warning(
            f"method_kwargs.mixing.num_hard={mixing.num_hard}: an anchor has {offered} "
            "negatives in the batch, all of which are mined; take fewer, a larger batch or "
            "negatives=queue"
        )


def term_metrics(
    terms: Sequence[ContrastiveTerms], *, debiased: bool, mixing: bool
) -> dict[str, Tensor]:
    """Metrics of the loss terms, each the mean over the loss's directions.

    Args:
        terms: one per direction.
        debiased: whether the estimate of the negatives is clamped from below.
        mixing: whether negatives are mixed.
    """
    names = {"train_hardness": "hardness"}
    if debiased:
        names["train_clamped_fraction"] = "floored"
    if mixing:
        names |= {"train_mined_similarity": "mined", "train_mixed_similarity": "mixed"}
    return {
        metric: torch.stack([getattr(t, name) for t in terms]).mean()
        for metric, name in names.items()
    }


def queue_metrics(name: str, queue: FeatureQueue) -> dict[str, Tensor]:
    """Metrics of a queue, as tensors on its device; the host does not wait for the device.

    Args:
        name: part of the metrics' names.
        queue: the queue.
    """
    device = queue.value.device
    return {
        f"train_{name}_filled": torch.full((), queue.filled, device=device),
        f"train_{name}_age": torch.full((), float(queue.age), device=device),
    }
