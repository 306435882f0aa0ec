"""What all distillation methods share: a frozen teacher, a student head, one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError
from solo_ext.core.geometry import effective_rank
from solo_ext.data.indexed import training_set
from solo_ext.data.transforms import statistics
from solo_ext.host import BaseMethod
from solo_ext.memory.heads import projector
from solo_ext.memory.renormalize import Renormalize
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.memory.teacher import Teacher
from solo_ext.memory.teacher_cache import TeacherCache
from solo_ext.methods.distillation_kwargs import (
    TEACHER,
    DistillationKwargs,
    source_of,
    teacher_name,
    validate,
)
from solo_ext.methods.projected import ProjectedMethod
from solo_ext.methods.registry import fill_method_kwargs, logger
from solo_ext.pretrained.heads import build_head
from solo_ext.pretrained.teachers import LoadedTeacher, load_teacher


class Distillation(ProjectedMethod, ABC):
    """Trains the student to say of a view what a frozen teacher says of the same view.

    Student and teacher see the same crops; where they are normalised otherwise than the teacher's
    were, its copy is normalised anew. Subclasses give :meth:`distill`.

    Logs ``train_<method>_loss``, and once per epoch ``train_effective_rank`` and
    ``train_teacher_effective_rank`` of the embeddings of the last batch.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`DistillationKwargs`.

    Raises:
        UserError: a teacher that cannot be read or is not what the config says.
        ConfigError: a crop size that the teacher does not take, or no head to go by.
    """

    kwargs_type: type[DistillationKwargs] = DistillationKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.cfg.method_kwargs
        loaded = load_teacher(source_of(kwargs.teacher))
        self.teacher = Teacher(
            loaded.backbone,
            loaded.head,
            digest=loaded.digest,
            dtype=getattr(torch, kwargs.teacher.dtype),
            in_checkpoint=kwargs.teacher.in_checkpoint,
            prototypes=self._prototypes_of(loaded),
        )
        self.teacher_views = nn.ModuleList(self._renormalizers(loaded))
        self.projector = self._new_projector(loaded)
        rows = len(self.teacher_views)
        self.cache = TeacherCache(rows * loaded.embed_dim) if kwargs.teacher.cache else None
        self._cached = False
        self._description = loaded.description
        self._last: tuple[Tensor, Tensor] | None = None
        self._build(kwargs, loaded)
        self._refuse_sizes(loaded)
        keep_out_of_broadcast(self)

    def _prototypes_of(self, loaded: LoadedTeacher) -> Tensor | None:
        """What the teacher keeps of the prototypes that it came with."""
        return None

    def _build(self, kwargs: Any, loaded: LoadedTeacher) -> None:
        """Makes what the method has besides student and teacher."""

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        return validate(
            fill_method_kwargs(BaseMethod.add_and_assert_specific_cfg(cfg), cls.kwargs_type)
        )

    @property
    def num_targets(self) -> int:
        """Crops that the teacher sees, the first of a batch."""
        return int(self.num_large_crops)

    def _renormalizers(self, loaded: LoadedTeacher) -> list[nn.Module]:
        """From the normalisation of each crop that the teacher sees to the teacher's own."""
        entries = [a for a in self.cfg.augmentations for _ in range(a.num_crops)]
        made: list[nn.Module] = []
        for entry in entries[: self.num_targets]:
            given = statistics(self.cfg.data.dataset, entry)
            made.append(Renormalize(*given, loaded.mean, loaded.std))
        return made

    def _new_projector(self, loaded: LoadedTeacher) -> nn.Module:
        kwargs = self.cfg.method_kwargs
        normalised = kwargs.head_batch_norm
        if kwargs.head == "mlp":
            return projector(
                self.features_dim,
                kwargs.proj_hidden_dim or self.features_dim,
                loaded.embed_dim,
                batch_norm=bool(normalised),
                layers=kwargs.proj_layers,
            )
        if loaded.head_spec is None:
            raise ConfigError(
                "method_kwargs.head",
                "teacher",
                f"there is no head to go by: {loaded.description}",
                "take mlp",
            )
        if normalised is None and not _has_batch_norm(loaded.backbone):
            normalised = True
        return build_head(loaded.head_spec, self.features_dim, batch_norm=normalised)

    def _refuse_sizes(self, loaded: LoadedTeacher) -> None:
        """Shows the teacher an image of every size that it will see."""
        sizes = [a.crop_size for a in self.cfg.augmentations for _ in range(a.num_crops)]
        for size in dict.fromkeys(sizes[: self.num_targets]):
            try:
                # Not through the teacher, whose fp16 is for other devices.
                with torch.no_grad():
                    loaded.backbone(torch.zeros(1, 3, size, size))
            except (RuntimeError, AssertionError, ValueError) as error:
                raise ConfigError(
                    "augmentations",
                    f"crop_size: {size}",
                    f"the teacher {teacher_name(self.cfg.method_kwargs.teacher)!r} does not take "
                    f"it: {str(error).splitlines()[0]}",
                    f"take crops of {loaded.input_size}",
                ) from None

    def on_train_start(self) -> None:
        """Sizes the cache by the training set, and says which teacher this is."""
        super().on_train_start()
        dtype = self.cfg.method_kwargs.teacher.dtype
        if dtype == "float16" and self.device.type == "cpu":
            raise ConfigError(
                f"{TEACHER}.dtype", dtype, "CPUs have no fast fp16", "take bfloat16 or float32"
            )
        if self.trainer.is_global_zero:
            logger.info(f"teacher: {self._description}")
        if self.cache is not None:
            self.cache.resize_(len(training_set(self.trainer, self.cfg)))

    def on_train_epoch_start(self) -> None:
        """Asks once per epoch whether the cache holds every image."""
        super().on_train_epoch_start()
        self._cached = self.cache is not None and self.cache.complete

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The distillation loss plus the online classifier's."""
        indices, crops, _ = batch
        crops = [crops] if isinstance(crops, Tensor) else crops
        out = super().training_step(batch, batch_idx)
        targets = self.targets(indices, crops)
        loss, metrics = self.distill(out["z"], targets)
        self._last = out["z"][0].detach(), targets[0]
        metrics = {f"train_{self.cfg.method}_loss": loss, **metrics}
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def targets(self, indices: Tensor, crops: Sequence[Tensor]) -> list[Tensor]:
        """The teacher's embeddings (N, D) of the crops that it sees, without gradient.

        Args:
            indices: (N,) sample indices.
            crops: (N, 3, H, W) each, as the student sees them.
        """
        if self.cache is not None and self._cached:
            return list(self.cache.get(indices).chunk(len(self.teacher_views), 1))
        seen = []
        for renormalized, crop in zip(self.teacher_views, crops[: self.num_targets], strict=True):
            if not self.no_channel_last:
                crop = crop.to(memory_format=torch.channels_last)
            seen.append(self.teacher(renormalized(crop)))
        if self.cache is not None:
            self.cache.update_(indices, torch.cat(seen, 1))
        return seen

    @abstractmethod
    def distill(
        self, students: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss.

        Args:
            students: (N, D) embeddings of the student, one per crop.
            targets: (N, D) embeddings of the teacher, of the first :attr:`num_targets` crops.

        Returns:
            Scalar, and what to log.
        """

    def on_train_epoch_end(self) -> None:
        """Logs the geometry of the last batch's embeddings."""
        super().on_train_epoch_end()
        if self._last is None:
            return
        student, teacher = (F.normalize(z.float(), dim=1) for z in self._last)
        self._last = None
        ranks = {
            "train_effective_rank": effective_rank(student),
            "train_teacher_effective_rank": effective_rank(teacher),
        }
        self.log_dict(ranks, sync_dist=True)


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
