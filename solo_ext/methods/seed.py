"""SEED and the baselines that share its step (Fang et al., ICLR 2021, arXiv 2101.04731).

One step (section 3.2), for each crop x of an image and a queue D of the teacher's embeddings::

    z_S = g(f_S(x))                                                          training_step
    z_T = f_T(x), without gradient; both of unit length from here on         Distillation.targets
    D+ = [z_T, D]                                                            losses.seed.plain_seed
    p_S = softmax(z_S . D+ / tau_S), p_T = softmax(z_T . D+ / tau_T)         losses.seed.plain_seed
    loss = -sum p_T log p_S                                                  losses.seed.plain_seed
    z_T enters D                                                             on_train_batch_end

``seed_terms``, which :meth:`SEED.distill` calls for every crop, is equal to ``plain_seed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError
from solo_ext.core.precision import factors_dtype, full_precision
from solo_ext.core.types import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
)
from solo_ext.kernels.normalized import normalized
from solo_ext.losses.contrastive import NegativeEstimator, contrastive, own_columns
from solo_ext.losses.seed import seed_terms
from solo_ext.memory.features import FeatureQueue
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.distillation import Distillation, DistillationKwargs
from solo_ext.methods.negatives import (
    MixingKwargs,
    MixingSampler,
    fill_num_hard,
    queue_metrics,
    term_metrics,
)
from solo_ext.methods.registry import METHODS, capped_queue, fill_from_data


class SEEDKwargs(DistillationKwargs):
    """``method_kwargs`` of :class:`SEED`; the default head has the student's own width.

    Attributes:
        loss: ``seed``: cross-entropy of the distributions of similarities; ``contrastive``: the
            teacher's embedding of the same crop is the positive, others are the negatives;
            ``regression``: squared distance of the normalised embeddings.
        student_temperature: above 0; the temperature of ``contrastive`` too.
        teacher_temperature: required by ``loss: seed``, as the paper has 0.01 and the official code
            1e-4, which makes the loss InfoNCE.
        queue_size: number of past embeddings of the teacher; null: 65,536, but at most an eighth of
            the training images. With ``small_crop_target: own`` a second queue of this size holds
            embeddings of small crops.
        small_crop_target: what small crops learn: the teacher's output for themselves (``own``, as
            published), or for the large crops (``large``), which saves its forward pass on small
            ones.
        small_weight: weight of the mean over small crops; the mean over large crops has weight 1.
        negatives: for ``contrastive``: the teacher's past embeddings or those of the batch.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; above 0 debiases.
        beta: 0 or more; above 0, more similar negatives have larger weights.
        detach_weights: whether the weights of negatives are constants to the gradient.
        mixing: for ``contrastive``, MoCHi's synthetic negatives; none by default.

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
    images learns to match the teacher's distribution. The setting ``loss`` selects a contrastive
    loss with the teacher's embedding as the positive, or regression of the embedding, instead.

    Logs what :class:`Distillation` does, and those metrics of docs/reference/logged.md that apply.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`SEEDKwargs`.

    Example:
        >>> import tempfile, timm
        >>> from solo_ext.methods.registry import example_config
        >>> network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)
        >>> file = tempfile.NamedTemporaryFile()
        >>> torch.save(network.state_dict(), file.name)
        >>> teacher = {"layout": "timm", "path": file.name, "model": "resnet10t"}
        >>> teacher["model_kwargs"] = {"channels": [8, 8, 8, 8]}
        >>> kwargs = {"teacher": teacher, "teacher_temperature": 0.01, "queue_size": 16}
        >>> method = SEED(example_config("seed", large=1, **kwargs))
        >>> crop = torch.randn(4, 3, 32, 32)
        >>> z_s, z_t = method(crop)["z"], method.targets(crop)[0]
        >>> z_s.shape, z_t.shape, z_t.requires_grad
        (torch.Size([4, 8]), torch.Size([4, 8]), False)
        >>> method.distill([z_s], [z_t])[0].shape
        torch.Size([])
    """

    kwargs_type = SEEDKwargs
    kwargs: SEEDKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.kwargs
        # Small crops with targets of their own have a second queue.
        count = 2 if self.num_targets > self.num_large_crops else 1
        size = kwargs.queue_size if _is_queued(kwargs) else None
        queues = (FeatureQueue(size, self.embed_dim) for _ in range(count) if size)
        self.queues: Any = nn.ModuleList(queues)
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self._mixing = MixingSampler(kwargs.mixing)
        self.step_draws = self._mixing.generators
        keep_out_of_broadcast(self)

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        cls.fill_sizes(cfg)
        _check_loss(cfg.method_kwargs)
        fill_num_hard(cfg)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the queue's size from the training set if a queue is needed and its size is null."""
        if _is_queued(cfg.method_kwargs):
            fill_from_data(cfg, {"queue_size": capped_queue(65536)}, images)

    @property
    def num_targets(self) -> int:
        """Number of crops that the teacher sees: large ones, and small ones if they are targets."""
        small = self.kwargs.small_crop_target == "own"
        return int(self.num_crops if small else self.num_large_crops)

    def on_train_start(self) -> None:
        """Gives every process the same queues."""
        super().on_train_start()
        distributed.broadcast_buffers(*self.queues)
        self._mixing.warn_of_late_start(self.cfg)

    def on_train_batch_start(self, batch: Sequence[Any], batch_idx: int) -> None:
        """Seeds the draws of the step."""
        self._mixing.begin(self._seed, self.current_epoch, batch_idx)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """SEED's step (section 3.2), plus the online classifier's loss."""
        _, crops, _ = batch
        out = super().training_step(batch, batch_idx)
        z_s = out["z"]  # g(f_S(x)) of every crop
        z_t = self.targets(crops)  # f_T(x) of the same crops, frozen
        loss, metrics = self.distill(z_s, z_t)
        self.log_step(loss, metrics, z_s)
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
        students = [normalized(z) for z in full_precision(*students)]
        targets = [F.normalize(t, dim=1) for t in full_precision(*targets)]
        large = self.num_large_crops
        queues = [queue.value for queue in self.queues]
        first, last = (queues[0], queues[-1]) if queues else (None, None)
        pairs = list(zip(students[:large], targets[:large], strict=True))
        loss, metrics = self._mean_over(pairs, first)
        if len(students) > large:
            if len(targets) > large:
                pairs = list(zip(students[large:], targets[large:], strict=True))
            else:
                # Small crops whose targets are large crops use the large crops' queue.
                pairs = [(s, t) for s in students[large:] for t in targets]
            small, _ = self._mean_over(pairs, last)
            loss = loss + self.kwargs.small_weight * small
        with torch.no_grad():
            metrics["train_teacher_similarity"] = (students[0] * targets[0]).sum(1).mean()
        # Queue one large and one small crop, so that every image has one row per queue.
        self._step_keys = [targets[0], *targets[large : large + 1]]
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
        """The loss of z_S given z_T, unit rows, against the queue D."""
        kwargs = self.kwargs
        if kwargs.loss == "seed":
            assert queue is not None
            assert kwargs.teacher_temperature is not None
            temperatures = kwargs.student_temperature, kwargs.teacher_temperature
            # -sum p_T log p_S (section 3.2)
            dtype = factors_dtype("auto", student.device)
            loss, entropy, own = seed_terms(student, target, queue, *temperatures, dtype)
            return loss, {"train_target_entropy": entropy, "train_target_own": own}
        if kwargs.loss == "regression":
            # |z_S - z_T|^2 of unit vectors
            return (2 - 2 * (student * target).sum(1)).mean(), {}
        # z_T is the positive. Negatives are the queue, or the batch less the image itself.
        candidates = distributed.gather(target) if queue is None else queue
        own_column = own_columns(target) if queue is None else None
        available = len(candidates) - (queue is None)
        found = contrastive(
            student,
            target.unsqueeze(1),
            candidates,
            excluded_columns=own_column,
            estimator=self.estimator,
            mixing=self._mixing.draw(self.current_epoch, available, student),
            temperature=kwargs.student_temperature,
        )
        debiased, mixed = kwargs.tau_plus > 0, self._mixing.active(self.current_epoch)
        return found.loss, term_metrics([found], debiased=debiased, mixing=mixed)

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Writes the teacher's embeddings into the queues."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        for past, keys in zip(self.queues, self._step_keys, strict=False):
            past.update_(distributed.gather(keys))

    def on_train_epoch_end(self) -> None:
        """Logs fill and age of the first queue."""
        super().on_train_epoch_end()
        for queue in self.queues[:1]:
            self.log_dict(queue_metrics("queue", queue), sync_dist=True)


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
    mixing = kwargs.mixing.num_pair_mixes + kwargs.mixing.num_query_mixes
    for name, value, reader in (
        ("teacher_temperature", kwargs.teacher_temperature, "seed"),
        ("tau_plus", kwargs.tau_plus, "contrastive"),
        ("beta", kwargs.beta, "contrastive"),
        ("mixing", mixing, "contrastive"),
        ("negatives", kwargs.negatives == "batch" and "batch", "contrastive"),
    ):
        if value and kwargs.loss != reader:
            raise ConfigError(
                f"method_kwargs.{name}",
                value,
                f"loss={kwargs.loss} does not read it",
                f"leave it out, or take loss={reader}",
            )
