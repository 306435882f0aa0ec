"""What SEED and ProtoSEED share: a frozen teacher, and the student's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError, first_line
from solo_ext.core.types import PositiveInt, Section
from solo_ext.host import BaseMethod
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory.heads import projector
from solo_ext.memory.teacher import Renormalize, Teacher, TeacherKwargs
from solo_ext.methods.projected import ProjectedMethod
from solo_ext.methods.registry import fill_method_kwargs, logger, typed_kwargs

if TYPE_CHECKING:
    from solo_ext.pretrained.loaded import LoadedTeacher


class DistillationKwargs(Section):
    """What ``method_kwargs`` of :class:`SEED` and :class:`ProtoSEED` share.

    Attributes:
        teacher: as :class:`TeacherKwargs`.
        head: the student's head: ``teacher``: layers like those of the teacher's head; ``mlp``:
            linear layers with ReLU between them. Both end in the size of the teacher's embeddings.
        head_batch_norm: whether the head's hidden layers have batch norm; null: as in the teacher's
            head, always if the teacher's backbone has none (vision transformers), not for ``mlp``.
        proj_hidden_dim: width of the hidden layers of an ``mlp``; null: that of the features.
        proj_layers: number of linear layers of an ``mlp``.

    Example:
        >>> teacher = {"layout": "timm", "model": "resnet50.a1_in1k"}
        >>> kwargs = DistillationKwargs(teacher=teacher, head="mlp")
        >>> kwargs.teacher.dtype, kwargs.proj_layers
        ('float32', 2)
    """

    teacher: TeacherKwargs = TeacherKwargs()
    head: Literal["teacher", "mlp"] = "teacher"
    head_batch_norm: bool | None = None
    proj_hidden_dim: PositiveInt | None = None
    proj_layers: PositiveInt = 2


class Distillation(ProjectedMethod):
    """A student that sees the same crops as a frozen teacher; subclasses define the loss.

    If crops are not normalised as the teacher's training images were, they are normalised anew for
    the teacher. Subclasses end their ``__init__`` with ``keep_out_of_broadcast(self)``.

    Logs ``train_<method>_loss``, metrics of the loss, and once per epoch
    ``train_effective_rank`` and ``train_teacher_effective_rank`` of the embeddings of the last
    batch.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`DistillationKwargs`.

    Raises:
        UserError: the teacher cannot be read or is not what the config says.
        ConfigError: the teacher does not accept a crop size, or lacks the head or the prototypes
            that the config asks for.

    Example:
        >>> import tempfile, timm
        >>> from solo_ext.methods.registry import example_config
        >>> network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)
        >>> file = tempfile.NamedTemporaryFile()
        >>> torch.save(network.state_dict(), file.name)
        >>> teacher = {"layout": "timm", "path": file.name, "model": "resnet10t"}
        >>> teacher["model_kwargs"] = {"channels": [8, 8, 8, 8]}
        >>> cfg = example_config("seed", large=2, teacher=teacher, head="mlp")
        >>> method = Distillation(Distillation.add_and_assert_specific_cfg(cfg))
        >>> [tuple(z.shape) for z in method.targets([torch.randn(4, 3, 32, 32)] * 2)]
        [(4, 8), (4, 8)]
    """

    kwargs_type: type[DistillationKwargs] = DistillationKwargs
    kwargs: Any
    """An instance of :attr:`kwargs_type`."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        # Imported here: registering a method does not need the code that reads teachers.
        from solo_ext.config.check import common_config
        from solo_ext.data.transforms import statistics
        from solo_ext.pretrained.teachers import load_teacher

        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, self.kwargs_type)
        loaded = load_teacher(kwargs.teacher)
        if self.keep_prototypes and loaded.prototypes is None:
            raise ConfigError(
                "method_kwargs.prototypes",
                "old",
                f"the teacher has no prototypes: {loaded.description}",
                "take new",
            )
        self.embed_dim = loaded.embed_dim
        self.teacher = Teacher(
            loaded.backbone,
            loaded.head,
            digest=loaded.digest,
            dtype=getattr(torch, kwargs.teacher.dtype),
            prototypes=loaded.prototypes if self.keep_prototypes else None,
        )
        views = zip(common_config(self.cfg).augmentations, self.cfg.augmentations, strict=True)
        crops = [crop for crop, given in views for _ in range(given.num_crops)][: self.num_targets]
        _refuse_sizes({crop.crop_size for crop in crops}, loaded)
        self.teacher_views = nn.ModuleList(
            Renormalize(*statistics(self.cfg.data.dataset, crop), loaded.mean, loaded.std)
            for crop in crops
        )
        self.projector = _student_head(kwargs, self.features_dim, loaded)
        self.description = loaded.description
        self._teacher_embeddings: Tensor | None = None

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        from solo_ext.pretrained.teachers import check_source

        cfg = fill_method_kwargs(BaseMethod.add_and_assert_specific_cfg(cfg), cls.kwargs_type)
        if not 1 <= cfg.data.num_large_crops <= 2:
            raise ConfigError(
                "augmentations",
                f"{cfg.data.num_large_crops} large crops",
                f"{cfg.method} has one target for all crops, or one for each of two large crops",
                "give the largest crop_size num_crops: 1 or 2",
            )
        check_source(typed_kwargs(cfg.method_kwargs, cls.kwargs_type).teacher)
        return cfg

    @property
    def num_targets(self) -> int:
        """Number of crops that the teacher sees, counted from the first."""
        return int(self.num_large_crops)

    @property
    def keep_prototypes(self) -> bool:
        """Whether to keep the prototypes in the teacher's file, which must then have some."""
        return False

    def on_train_start(self) -> None:
        """Logs which teacher is used."""
        super().on_train_start()
        if self.trainer.is_global_zero:
            logger.info(f"teacher: {self.description}")

    def targets(self, crops: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """The teacher's embeddings (N, D) of the crops that it sees, without gradient.

        Args:
            crops: (N, 3, H, W) each, as the student sees them.
        """
        crops = [crops] if isinstance(crops, Tensor) else crops
        seen = []
        for renormalized, crop in zip(self.teacher_views, crops[: self.num_targets], strict=True):
            if not self.no_channel_last:
                crop = crop.to(memory_format=torch.channels_last)
            seen.append(self.teacher(renormalized(crop)))
        self._teacher_embeddings = seen[0]
        return seen

    def geometry(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Effective ranks of the student's and the teacher's embeddings of the first crop."""
        assert self._teacher_embeddings is not None
        teacher, self._teacher_embeddings = (
            F.normalize(self._teacher_embeddings.float(), dim=1),
            None,
        )
        return {
            "train_effective_rank": effective_rank(views[0]),
            "train_teacher_effective_rank": effective_rank(teacher),
        }


def _student_head(
    kwargs: DistillationKwargs, features_dim: int, loaded: LoadedTeacher
) -> nn.Module:
    """The student's projector, which ends in the size of the teacher's embeddings."""
    from solo_ext.pretrained.loaded import build_head

    normalised = kwargs.head_batch_norm
    if kwargs.head == "mlp":
        return projector(
            features_dim,
            kwargs.proj_hidden_dim or features_dim,
            loaded.embed_dim,
            batch_norm=bool(normalised),
            layers=kwargs.proj_layers,
        )
    if loaded.head is None:
        raise ConfigError(
            "method_kwargs.head",
            "teacher",
            f"the teacher has no head: {loaded.description}",
            "take mlp",
        )
    norms = nn.modules.batchnorm._BatchNorm
    if normalised is None and not any(isinstance(m, norms) for m in loaded.backbone.modules()):
        normalised = True
    return build_head(loaded.head, features_dim, batch_norm=normalised)


def _refuse_sizes(sizes: set[int], loaded: LoadedTeacher) -> None:
    """Refuses sizes that the teacher fails on; runs the teacher once on an image of every size."""
    for size in sizes:
        try:
            # Bypass the Teacher wrapper, which may compute in fp16: that is slow on a CPU.
            with torch.no_grad():
                loaded.backbone(torch.zeros(1, 3, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ConfigError(
                "augmentations",
                f"crop_size: {size}",
                f"the teacher refuses it ({first_line(error)}): {loaded.description}",
                f"take crops of {loaded.input_size}",
            ) from None
