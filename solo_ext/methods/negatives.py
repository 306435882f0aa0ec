"""MoCHi's mixing of negatives, annealing of their weights, and metrics of terms and queues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.draws import StepGenerators, derive_seed
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeInt, PositiveInt, Section
from solo_ext.losses.contrastive import ContrastiveTerms, Mixing
from solo_ext.losses.mochi import draw_mixes
from solo_ext.memory.features import FeatureQueue
from solo_ext.methods.registry import logger


def annealed_beta(beta: float, epoch: int, epochs: int) -> float:
    """Beta in an epoch, counted from 0, of a run in which it falls towards 0 in nine steps.

    >>> [annealed_beta(1.0, epoch, 9) for epoch in (0, 1, 2, 3, 8)]
    [1.0, 1.0, 0.875, 0.75, 0.125]
    """
    done = epoch // max(epochs // 9, 1)
    return beta * min(max((9 - done) / 8, 0.0), 1.0)


class MixingKwargs(Section):
    """``method_kwargs.mixing``: MoCHi's synthetic negatives; none by default.

    Attributes:
        num_hard: N, number of hard negatives, those most similar to the query, that are mixed;
            null: 1,024, but at most a sixteenth of the queue, which are the paper's number for
            ImageNet and its ratio for ImageNet-100.
        num_pair_mixes: s, number of mixtures of two hard negatives.
        num_query_mixes: s', number of mixtures of a hard negative with the query.
        warmup_epochs: number of first epochs without mixtures.

    Example:
        >>> MixingKwargs(num_pair_mixes=64)
        MixingKwargs(num_hard=None, num_pair_mixes=64, num_query_mixes=0, warmup_epochs=10)
    """

    num_hard: PositiveInt | None = None
    num_pair_mixes: NonNegativeInt = 0
    num_query_mixes: NonNegativeInt = 0
    warmup_epochs: NonNegativeInt = 10


class MixingSampler:
    """Draws MoCHi's mixtures by seeds that differ by step and rank and are the same after resuming.

    Args:
        settings: numbers of mixtures, completed by :func:`fill_num_hard`.

    Example:
        >>> mixing = MixingSampler(MixingKwargs(num_hard=4, num_pair_mixes=6, warmup_epochs=2))
        >>> mixing.active(epoch=1), mixing.active(epoch=2)
        (False, True)
        >>> mixing.begin(seed=5, epoch=2, batch_idx=0)
        >>> mixing.draw(epoch=2, available=9, anchors=torch.zeros(3, 8)).draws.pair_indices.shape
        torch.Size([3, 6, 2])
    """

    def __init__(self, settings: MixingKwargs) -> None:
        self._settings = settings
        self.generators = StepGenerators(_seed_of_draw)

    def active(self, epoch: int) -> bool:
        """Whether negatives are mixed in an epoch."""
        settings = self._settings
        some = settings.num_pair_mixes + settings.num_query_mixes > 0
        return some and epoch >= settings.warmup_epochs

    def begin(self, seed: int, epoch: int, batch_idx: int) -> None:
        """Seeds the draws of one step; ``seed`` is the run's."""
        self.generators.begin(derive_seed(seed, distributed.rank(), epoch, batch_idx))

    def draw(self, epoch: int, available: int, anchors: Tensor) -> Mixing | None:
        """Draws the mixtures of each anchor; ``None`` in epochs without mixtures.

        Args:
            epoch: current epoch.
            available: number of negatives of an anchor.
            anchors: (N, D).
        """
        if not self.active(epoch):
            return None
        # A small batch may have fewer negatives than `num_hard` asks for.
        mined = max(min(self._settings.num_hard or available, available), 1)
        counts = self._settings.num_pair_mixes, self._settings.num_query_mixes
        own = self.generators.next(anchors.device)
        return Mixing(mined, draw_mixes(anchors, mined, *counts, own), ranked=False)

    def warn_of_late_start(self, cfg: DictConfig) -> None:
        """Warns if the run ends before the first mixture."""
        late = self._settings.warmup_epochs
        if self.active(late) and late >= cfg.max_epochs:
            rank_zero_only(logger.warning)(
                f"method_kwargs.mixing.warmup_epochs={late} of max_epochs={cfg.max_epochs}: "
                "no negatives will ever be mixed; take fewer"
            )


def _seed_of_draw(seed: int, number: int) -> int:
    for _ in range(number + 1):
        seed = derive_seed(seed)
    return seed


def fill_num_hard(cfg: DictConfig) -> None:
    """Sets and logs ``mixing.num_hard`` if it is null and mixtures are asked for.

    Args:
        cfg: the config; ``queue_size`` is already set where there is a queue.

    Raises:
        ConfigError: the queue has fewer rows than ``num_hard``.

    Example:
        >>> from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
        >>> from solo_ext.methods.registry import example_config, fill_method_kwargs
        >>> kwargs = {"queue_size": 4096, "exclude_own": True, "mixing": {"num_pair_mixes": 64}}
        >>> kwargs["negatives"] = "queue"
        >>> cfg = fill_method_kwargs(example_config("mochi", **kwargs), ContrastiveKwargs)
        >>> fill_num_hard(cfg)
        >>> cfg.method_kwargs.mixing.num_hard
        256
    """
    kwargs, mixing = cfg.method_kwargs, cfg.method_kwargs.mixing
    if not mixing.num_pair_mixes + mixing.num_query_mixes:
        return
    rows = kwargs.queue_size if kwargs.negatives == "queue" else None
    if mixing.num_hard is None:
        mixing.num_hard = 1024 if rows is None else max(1, min(1024, rows // 16))
        rank_zero_only(logger.info)(f"{cfg.method}: mixing.num_hard={mixing.num_hard}")
    if rows is None:
        return
    # A queue longer than an epoch may hold several keys of an image, all of which are excluded.
    excludes = kwargs.get("exclude_own") or kwargs.get("positives") == "nearest_neighbor"
    most = rows // 2 if excludes else rows
    if mixing.num_hard > most:
        raise ConfigError(
            "method_kwargs.mixing.num_hard",
            mixing.num_hard,
            f"the queue has {rows} rows",
            f"allowed: up to {most}",
        )


def term_metrics(
    terms: Sequence[ContrastiveTerms], *, debiased: bool, mixing: bool
) -> dict[str, Tensor]:
    """Metrics of the loss's terms, each a mean over its directions.

    Args:
        terms: one per direction of the loss.
        debiased: whether the estimate of the negatives is clamped from below.
        mixing: whether negatives are mixed.

    Example:
        >>> rows = ContrastiveTerms(*[torch.tensor(0.5)] * len(ContrastiveTerms._fields))
        >>> term_metrics([rows, rows], debiased=True, mixing=False)
        {'train_hardness': tensor(0.5000), 'train_clamped_fraction': tensor(0.5000)}
    """
    names = {"train_hardness": "hardness"}
    if debiased:
        names["train_clamped_fraction"] = "clamped"
    if mixing:
        names |= {"train_mined_similarity": "mined", "train_mixed_similarity": "mixed"}
    return {metric: mean_of([getattr(t, name) for t in terms]) for metric, name in names.items()}


def mean_of(scalars: Sequence[Tensor]) -> Tensor:
    """The mean of scalars; a single one costs no operation.

    Example:
        >>> mean_of([torch.tensor(1.0), torch.tensor(2.0)])
        tensor(1.5000)
    """
    return torch.stack(list(scalars)).mean() if len(scalars) > 1 else scalars[0]


def queue_metrics(name: str, queue: FeatureQueue) -> dict[str, float]:
    """Fill and age of a queue.

    Example:
        >>> queue_metrics("queue", FeatureQueue(8, dim=2))
        {'train_queue_filled': 0.0, 'train_queue_age': 0.0}
    """
    return {f"train_{name}_filled": queue.filled, f"train_{name}_age": queue.age}
