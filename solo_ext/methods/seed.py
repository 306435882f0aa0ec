"""SEED and the baselines that share its step (Fang et al., ICLR 2021, arXiv 2101.04731)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt, ProbabilityBelowOne
from solo_ext.losses.contrastive import NegativeEstimator, contrastive
from solo_ext.losses.seed import seed_terms
from solo_ext.memory.features import FeatureQueue
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.distillation import Distillation, DistillationKwargs, idle_in_head
from solo_ext.methods.negatives import (
    DrawnMixing,
    MixingKwargs,
    check_num_hard,
    fill_num_hard,
    idle_in_negatives,
    mixes,
    queue_metrics,
    report_mixing,
    term_metrics,
)
from solo_ext.methods.registry import (
    METHODS,
    fill_from_data,
    logger,
    warn_of_idle_settings,
    warn_of_the_floor,
)
from solo_ext.methods.registry import queue as queue_rows


class SEEDKwargs(DistillationKwargs):
    """``method_kwargs`` of :class:`SEED`; a head of the student's own width.

    Attributes:
        loss: ``seed``: cross-entropy of the distributions of similarities; ``contrastive``: the
            teacher's embedding of the same crop is the positive, others are the negatives;
            ``regression``: squared distance of the normalised embeddings.
        student_temperature: above 0; the temperature of ``contrastive`` too.
        teacher_temperature: of ``seed``, for which it must be given: the paper writes 0.01, the
            official code has 1e-4, which makes the loss InfoNCE.
        queue_size: past embeddings of the teacher; null: 65,536, up to an eighth of the training
            images. With ``small_crop_target: own`` a second queue of this size holds those of small
            crops.
        small_crop_target: what small crops learn: the teacher's output for themselves (``own``, as
            published), or for the large crops (``large``), which saves its forward pass on small
            ones.
        small_weight: weight of the mean over the small crops; that over the large ones has 1.
        negatives: of ``contrastive``: the teacher's past embeddings or those of the batch.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; above 0 debiases.
        beta: 0 or more; above 0 negatives weigh the more the more similar they are.
        detach_weights: no gradient through those weights.
        mixing: of ``contrastive``, MoCHi's synthetic negatives; none by default.

    Example:
        >>> SEEDKwargs(teacher_temperature=0.01).student_temperature
        0.2
    """

    SYNONYMS: ClassVar = {
        "temperature": "student_temperature",
        "temperature_q": "student_temperature",
        "temperature_k": "teacher_temperature",
    }
    """solo-learn's names of these settings."""

    head: Literal["teacher", "mlp"] = "mlp"
    loss: Literal["seed", "contrastive", "regression"] = "seed"
    student_temperature: PositiveFloat = 0.2
    teacher_temperature: PositiveFloat | None = None
    queue_size: PositiveInt | None = None
    small_crop_target: Literal["own", "large"] = "own"
    small_weight: NonNegativeFloat = 1.0
    negatives: Literal["queue", "batch"] = "queue"
    tau_plus: ProbabilityBelowOne = 0.0
    beta: NonNegativeFloat = 0.0
    detach_weights: bool = False
    mixing: MixingKwargs = MixingKwargs()


@METHODS.register(
    "seed",
    paper="SEED: Self-supervised Distillation For Visual Representation",
    year=2021,
    arxiv="2101.04731",
)
class SEED(Distillation):
    """Distils how a frozen teacher ranks past images by similarity (Fang et al., ICLR 2021).

    The student's distribution of similarities to the teacher's embeddings of this and of earlier
    images follows the teacher's. By config instead: any contrastive estimate with the teacher's
    embedding as the positive, or regression of the embedding. Large crops count as much as all
    small ones together, times ``small_weight``.

    Logs, besides what :class:`Distillation` does, ``train_teacher_similarity`` (cosine of the
    student's and the teacher's embeddings), with SEED's own loss ``train_target_entropy`` (nats)
    and ``train_target_own`` (share of the target on the image itself; near 1 the loss is InfoNCE),
    with a queue ``train_queue_filled`` and ``train_queue_age``, with a contrastive one
    ``train_hardness``, ``train_clamped_fraction``, ``train_mined_similarity`` and
    ``train_mixed_similarity``.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`SEEDKwargs`.
    """

    kwargs_type = SEEDKwargs
    kwargs: SEEDKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.kwargs
        # Small crops with targets of their own have a second queue.
        count = 2 if self.num_targets > self.num_large_crops else 1
        self.queues = nn.ModuleList(
            FeatureQueue(kwargs.queue_size, self.embed_dim)  # type: ignore[arg-type]  # filled in
            for _ in range(count if _is_queued(kwargs) else 0)
        )
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self._mixing = DrawnMixing(kwargs.mixing)
        self._written: list[Tensor] | None = None
        keep_out_of_broadcast(self)

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        cls.fill_sizes(cfg)
        _check_loss(cfg.method_kwargs)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the queue's size if one is needed and null, by the training set.

        Args:
            cfg: the config, ``method_kwargs`` filled in.
            images: number of training images; counted by default where it is needed.
        """
        if _is_queued(cfg.method_kwargs):
            fill_from_data(cfg, {"queue_size": queue_rows(65536)}, images)
        fill_num_hard(cfg)

    @property
    def num_targets(self) -> int:
        """Crops that the teacher sees: the large ones, and the small ones if they are targets."""
        small = self.kwargs.small_crop_target == "own"
        return int(self.num_crops if small else self.num_large_crops)

    def on_train_start(self) -> None:
        """Gives every process the same queues."""
        super().on_train_start()
        distributed.broadcast_buffers(*self.queues)
        if self.trainer.is_global_zero:
            report_settings(self.cfg, self.embed_dim)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """SEED's step (section 3.2), plus the online classifier's loss."""
        self._mixing.begin(self.cfg.get("seed") or 0, self.current_epoch, batch_idx)
        indices, crops, _ = batch
        out = super().training_step(batch, batch_idx)
        students = out["z"]  # of every crop, z_S = g(f_S(x))
        targets = self.targets(indices, crops)  # of the same crops, z_T = f_T(x), frozen
        loss, metrics = self.distill(students, targets)
        self.log_step(loss, metrics, students[0], targets[0])
        return loss + out["loss"]  # type: ignore[no-any-return]

    def distill(
        self, students: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over large crops, plus ``small_weight`` times that over small ones.

        Args:
            students: (N, D) embeddings of the student, one per crop.
            targets: (N, D) embeddings of the teacher, of the first :attr:`num_targets` crops.

        Returns:
            Scalar, and what to log.
        """
        students = [F.normalize(z.float(), dim=1) for z in students]
        targets = [F.normalize(t.float(), dim=1) for t in targets]
        large = self.num_large_crops
        queues = [cast(FeatureQueue, queue).value for queue in self.queues]
        first, last = (queues[0], queues[-1]) if queues else (None, None)
        pairs = list(zip(students[:large], targets[:large], strict=True))
        loss, metrics = self._mean_over(pairs, first)
        if len(students) > large:
            if len(targets) > large:
                pairs = list(zip(students[large:], targets[large:], strict=True))
            else:
                # Small crops whose targets are of large ones use the large crops' queue.
                pairs = [(s, t) for s in students[large:] for t in targets]
            small, _ = self._mean_over(pairs, last)
            loss = loss + self.kwargs.small_weight * small
        with torch.no_grad():
            metrics["train_teacher_similarity"] = (students[0] * targets[0]).sum(1).mean()
        if len(self.queues):
            metrics |= queue_metrics("queue", cast(FeatureQueue, self.queues[0]))
        # Queue one view of each kind: every image then has one row per queue.
        self._written = [targets[0], *targets[large : large + 1]]
        return loss, metrics

    def _mean_over(
        self, pairs: Sequence[tuple[Tensor, Tensor]], queue: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = zip(*(self._of_crop(s, t, queue) for s, t in pairs), strict=True)
        means = {name: torch.stack([m[name] for m in metrics]).mean() for name in metrics[0]}
        return torch.stack(losses).mean(), means

    def _of_crop(
        self, student: Tensor, target: Tensor, queue: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        kwargs = self.kwargs
        if kwargs.loss == "seed":
            assert queue is not None
            assert kwargs.teacher_temperature is not None
            # p_T = softmax(z_T.d / tau_T), p_S = softmax(z_S.d / tau_S) over d = [z_T, queue];
            # -p_T.log p_S
            terms = seed_terms(
                student, target, queue, kwargs.student_temperature, kwargs.teacher_temperature
            )
            return terms.loss, {
                "train_target_entropy": terms.entropy,
                "train_target_own": terms.own,
            }
        if kwargs.loss == "regression":
            # |z_S - z_T|^2 of unit vectors
            return (2 - 2 * (student * target).sum(1)).mean(), {}
        candidates, own = queue, None
        if candidates is None:
            # Negatives are the teacher's embeddings of the batch, less the image's own.
            candidates = distributed.gather(target)
            begin = distributed.rank() * len(target)
            own = torch.arange(begin, begin + len(target), device=target.device).unsqueeze(1)
        epoch, negatives = self.current_epoch, len(candidates) - (own is not None)
        found = contrastive(
            student,
            target.unsqueeze(1),
            candidates,
            excluded_columns=own,
            estimator=self.estimator,
            mixing=self._mixing.draw(epoch, negatives, student),
            temperature=kwargs.student_temperature,
        )
        debiased, mixed = self.estimator.tau_plus > 0, self._mixing.active(epoch)
        return found.loss, term_metrics([found], debiased=debiased, mixing=mixed)

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Writes the teacher's embeddings into the queues."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._written is None:
            return
        for queue, keys in zip(self.queues, self._written, strict=False):
            cast(FeatureQueue, queue).update_(distributed.gather(keys))
        self._written = None


def _is_queued(kwargs: Any) -> bool:
    contrasted = kwargs.loss == "contrastive" and kwargs.negatives == "queue"
    return bool(kwargs.loss == "seed" or contrasted)


def _check_loss(kwargs: Any) -> None:
    """Refuses a loss without a setting that it needs, or with one that it does not use."""
    if kwargs.loss == "seed" and kwargs.teacher_temperature is None:
        raise ConfigError(
            "method_kwargs.teacher_temperature",
            None,
            "the paper and its code differ a hundredfold, so that there is no default",
            "give 0.01 (paper) or 1.0e-4 (official code, where the loss is InfoNCE)",
        )
    if kwargs.loss != "seed" and kwargs.teacher_temperature is not None:
        raise ConfigError(
            "method_kwargs.teacher_temperature",
            kwargs.teacher_temperature,
            f"loss={kwargs.loss} has no distribution of the teacher",
            "leave it out",
        )
    mixed = mixes(kwargs)
    estimated = {"tau_plus": kwargs.tau_plus, "beta": kwargs.beta, "mixing": mixed}
    named = next((name for name, value in estimated.items() if value), None)
    if kwargs.loss != "contrastive" and named is not None:
        raise ConfigError(
            f"method_kwargs.{named}",
            estimated[named],
            f"loss={kwargs.loss} has no negatives",
            "take loss=contrastive, or leave it out",
        )
    check_num_hard(kwargs)


def report_settings(cfg: DictConfig, dim: int) -> None:
    """Warns of settings that do nothing or may surprise.

    Args:
        cfg: the config.
        dim: D of the embeddings.
    """
    kwargs = cfg.method_kwargs
    idle = idle_in_head(kwargs)
    if kwargs.loss == "contrastive":
        idle |= idle_in_negatives(kwargs)
    else:
        # _check_loss has already refused tau_plus, beta and mixtures.
        of_negatives = ("negatives", "detach_weights", "mixing")
        idle |= dict.fromkeys(of_negatives, f"loss={kwargs.loss} has no negatives")
    if kwargs.loss == "regression":
        idle["queue_size"] = "loss=regression has no queue"
        idle["student_temperature"] = "loss=regression has no temperature"
    if not cfg.data.num_small_crops:
        idle |= dict.fromkeys(("small_crop_target", "small_weight"), "there are no small crops")
    warn_of_idle_settings(cfg, SEEDKwargs, idle)
    if kwargs.loss == "seed":
        # Target weight of a queue whose rows all are as near as another photo of the same object.
        shared = kwargs.queue_size * math.exp(-0.05 / kwargs.teacher_temperature)
        if shared < 0.01:
            logger.warning(
                f"method_kwargs.teacher_temperature={kwargs.teacher_temperature} puts the whole "
                "target on the image itself: the loss is InfoNCE with the teacher's embedding as "
                "the positive (watch train_target_own); the paper has 0.01"
            )
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
