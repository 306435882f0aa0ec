"""Distillation of similarities, and of embeddings themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.losses.contrastive import NegativeEstimator, contrastive
from solo_ext.losses.seed import seed_terms
from solo_ext.memory.features import FeatureQueue
from solo_ext.methods.distillation import Distillation
from solo_ext.methods.distillation_report import report_seed
from solo_ext.methods.negatives import DrawnMixing, queue_metrics, term_metrics
from solo_ext.methods.registry import METHODS
from solo_ext.methods.seed_kwargs import SEEDKwargs, fill_sizes, is_queued, validate
from solo_ext.pretrained.teachers import LoadedTeacher


@METHODS.register(
    "seed",
    paper="SEED: Self-supervised Distillation For Visual Representation",
    year=2021,
    arxiv="2101.04731",
)
class SEED(Distillation):
    """Distils how a frozen teacher ranks an image against past ones (Fang et al., ICLR 2021).

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

    def _build(self, kwargs: Any, loaded: LoadedTeacher) -> None:
        self.embed_dim = loaded.embed_dim
        own = self.num_targets > self.num_large_crops
        count = (2 if own else 1) if is_queued(kwargs) else 0
        # The second holds small crops.
        self.queues = nn.ModuleList(
            FeatureQueue(kwargs.queue_size, loaded.embed_dim) for _ in range(count)
        )
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self._written: list[Tensor] | None = None
        self._mixing = DrawnMixing(kwargs.mixing)

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: Any) -> Any:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        fill_sizes(cfg)
        return validate(cfg)

    fill_sizes = staticmethod(fill_sizes)

    @property
    def num_targets(self) -> int:
        """The large crops, and the small ones where these are targets of their own."""
        small = self.cfg.method_kwargs.small_crop_target == "own"
        return int(self.num_crops if small else self.num_large_crops)

    def on_train_start(self) -> None:
        """Gives every process the same queues."""
        super().on_train_start()
        distributed.broadcast_buffers(*self.queues)
        if self.trainer.is_global_zero:
            report_seed(self.cfg, self.kwargs_type, self.embed_dim)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The distillation loss plus the online classifier's."""
        self._mixing.begin(self.cfg.get("seed") or 0, self.current_epoch, batch_idx)
        return super().training_step(batch, batch_idx)

    def distill(
        self, students: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over large crops, plus that over small ones; see :class:`Distillation`."""
        students = [F.normalize(z.float(), dim=1) for z in students]
        targets = [F.normalize(t.float(), dim=1) for t in targets]
        large = self.num_large_crops
        kinds = [list(zip(students[:large], targets[:large], strict=True))]
        if len(students) > large and len(targets) > large:
            kinds.append(list(zip(students[large:], targets[large:], strict=True)))
        elif len(students) > large:
            kinds.append([(s, t) for s in students[large:] for t in targets])
        weights = 1.0, float(self.cfg.method_kwargs.small_weight)
        loss, metrics = students[0].new_zeros(()), dict[str, Tensor]()
        for place, (pairs, weight) in enumerate(zip(kinds, weights, strict=False)):
            # Small crops that learn what the teacher says of large ones share their queue.
            queue = min(place, len(self.queues) - 1)
            part, found = self._mean_over(pairs, queue)
            loss = loss + weight * part
            metrics = found | metrics
        with torch.no_grad():
            metrics["train_teacher_similarity"] = (students[0] * targets[0]).sum(1).mean()
        if len(self.queues):
            metrics |= queue_metrics("queue", cast(FeatureQueue, self.queues[0]))
        # One view of each kind, so that an image stands once in its queue.
        self._written = [targets[0], *targets[large : large + 1]]
        return loss, metrics

    def _mean_over(
        self, pairs: Sequence[tuple[Tensor, Tensor]], place: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        kwargs = self.cfg.method_kwargs
        queue = cast(FeatureQueue, self.queues[place]).value if len(self.queues) else None
        if kwargs.loss == "regression":
            losses = [(2 - 2 * (s * t).sum(1)).mean() for s, t in pairs]
            return torch.stack(losses).mean(), {}
        if kwargs.loss == "seed":
            assert queue is not None
            temperatures = kwargs.student_temperature, kwargs.teacher_temperature
            terms = [seed_terms(s, t, queue, *temperatures) for s, t in pairs]
            metrics = {
                "train_target_entropy": torch.stack([t.entropy for t in terms]).mean(),
                "train_target_own": torch.stack([t.own for t in terms]).mean(),
            }
            return torch.stack([t.loss for t in terms]).mean(), metrics
        found = []
        for student, target in pairs:
            candidates, own = queue, None
            if candidates is None:
                candidates = distributed.gather(target)
                begin = distributed.rank() * len(target)
                own = torch.arange(begin, begin + len(target), device=target.device).unsqueeze(1)
            available = len(candidates) - (0 if own is None else 1)
            found.append(
                contrastive(
                    student,
                    target.unsqueeze(1),
                    candidates,
                    excluded_columns=own,
                    estimator=self.estimator,
                    mixing=self._mixing.draw(self.current_epoch, available, student),
                    temperature=kwargs.student_temperature,
                )
            )
        debiased = self.estimator.tau_plus > 0
        mixing = self._mixing.active(self.current_epoch)
        metrics = term_metrics(found, debiased=debiased, mixing=mixing)
        return torch.stack([t.loss for t in found]).mean(), metrics

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Writes the teacher's embeddings into the queues."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._written is None:
            return
        for queue, keys in zip(self.queues, self._written, strict=False):
            cast(FeatureQueue, queue).update_(distributed.gather(keys))
        self._written = None
