"""Settings that the distillation methods share."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from solo_ext.config.types import PositiveInt, method_kwargs
from solo_ext.core.errors import ConfigError
from solo_ext.data.transforms import first_random_setting
from solo_ext.methods.registry import require_indices
from solo_ext.pretrained.teacher_source import TeacherSource, check_source

TEACHER = "method_kwargs.teacher"
"""Where the settings of the teacher stand in the config."""


@method_kwargs
class TeacherKwargs:
    """``method_kwargs.teacher``: the frozen network whose embeddings are learned.

    Attributes:
        layout: whose file it is: ``run`` of solo-learn or solo_ext (a run directory or one of its
            checkpoints), the official files of ``moco_v2``, ``swav`` and ``dino``, a model of
            ``timm`` or ``torchvision``.
        path: the file or run directory; for timm and torchvision null means that they fetch the
            weights.
        model: the architecture, where the file does not say it; for timm and torchvision with the
            tag of its weights, such as ``resnet50.a1_in1k`` and ``resnet50:IMAGENET1K_V2``.
        model_kwargs: arguments of its constructor.
        networks: of a run with momentum networks, the ``online`` or the ``momentum`` ones.
        dtype: of the teacher's forward pass, by autocast.
        in_checkpoint: keep the teacher's weights in the student's checkpoints, not its digest
            alone; to resume the file is needed all the same.
        cache: keep the teacher's embeddings by sample index, for augmentations without chance.
    """

    layout: Literal["run", "moco_v2", "swav", "dino", "timm", "torchvision"] = "run"
    path: str | None = None
    model: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    networks: Literal["online", "momentum"] = "online"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    in_checkpoint: bool = False
    cache: bool = False


@method_kwargs
class DistillationKwargs:
    """``method_kwargs`` of :class:`solo_ext.methods.distillation.Distillation`.

    Attributes:
        teacher: as :class:`TeacherKwargs`.
        head: of the student: ``teacher``: layers like those of the teacher's head; ``mlp``: linear
            layers with ReLU between them. Either ends in the size of the teacher's embeddings.
        head_batch_norm: whether its hidden layers are normalised; null: as the teacher's are, and
            always where the teacher is a vision transformer; without a head to go by, not.
        proj_hidden_dim: width of the hidden layers of an ``mlp``; null: that of the features.
        proj_layers: linear layers of an ``mlp``.
    """

    teacher: TeacherKwargs = TeacherKwargs()
    head: Literal["teacher", "mlp"] = "teacher"
    head_batch_norm: bool | None = None
    proj_hidden_dim: PositiveInt | None = None
    proj_layers: PositiveInt = 2


def source_of(settings: Any) -> TeacherSource:
    """The teacher that ``method_kwargs.teacher`` names.

    Args:
        settings: :class:`TeacherKwargs`.
    """
    kwargs: Any = settings.model_kwargs
    if OmegaConf.is_config(kwargs):
        kwargs = OmegaConf.to_container(kwargs, resolve=True)
    return TeacherSource(
        layout=settings.layout,
        path=settings.path,
        model=settings.model,
        model_kwargs=kwargs,
        networks=settings.networks,
    )


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other, of the data and of the disk.

    Raises:
        ConfigError: naming the first that does not fit.
    """
    kwargs = cfg.method_kwargs
    if not 1 <= cfg.data.num_large_crops <= 2:
        raise ConfigError(
            "augmentations",
            f"{cfg.data.num_large_crops} large crops",
            f"{cfg.method} has one target for all crops, or one for each of two large crops",
            "give the largest crop_size num_crops: 1 or 2",
        )
    check_source(source_of(kwargs.teacher), TEACHER)
    if kwargs.teacher.cache:
        augmentations: Any = OmegaConf.to_container(cfg.augmentations, resolve=True)
        # solo-learn's own script mixes nothing, and has no such key.
        random = first_random_setting(augmentations, cfg.data.get("mix"))
        if random is not None:
            raise ConfigError(
                f"{TEACHER}.cache",
                True,
                f"the teacher sees another view in every epoch: {random} leaves it to chance",
                "take false, or augmentations without chance",
            )
        require_indices(cfg, "keeps the teacher's embeddings")
    return cfg


def teacher_name(settings: Any) -> str:
    """What a message calls the teacher."""
    return Path(settings.path).name if settings.path else str(settings.model)
