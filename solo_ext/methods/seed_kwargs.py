"""Settings of SEED and of the baselines in its frame."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from omegaconf import DictConfig

from solo_ext.config.types import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
    method_kwargs,
)
from solo_ext.core.errors import ConfigError
from solo_ext.methods.data_sizes import fill_from_data, queue
from solo_ext.methods.distillation_kwargs import DistillationKwargs
from solo_ext.methods.negatives import MixingKwargs, check_num_hard, fill_num_hard, mixes


@method_kwargs
class SEEDKwargs(DistillationKwargs):
    """``method_kwargs`` of :class:`solo_ext.methods.SEED`; a head of the student's own width.

    Attributes:
        loss: ``seed``: cross-entropy of the distributions of similarities; ``contrastive``: the
            teacher's embedding of the same crop is the positive, others are the negatives;
            ``regression``: squared distance of the normalised embeddings.
        student_temperature: above 0; the temperature of ``contrastive`` too.
        teacher_temperature: of ``seed``, for which it must be given: the paper writes 0.01, the
            official code has 1e-4, which makes the loss InfoNCE.
        queue_size: past embeddings of the teacher; null: 65,536, up to an eighth of the training
            images. A second queue of this size holds those of small crops that are targets of their
            own.
        small_crop_target: what small crops learn: what the teacher says of themselves (``own``, as
            published), or of the large crops (``large``), which spares its forward pass.
        small_weight: of the mean over the small crops beside that over the large.
        negatives: of ``contrastive``: the teacher's past embeddings or those of the batch.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; above 0 debiases.
        beta: 0 or more; above 0 negatives weigh the more the more similar they are.
        detach_weights: no gradient through those weights.
        mixing: of ``contrastive``, MoCHi's synthetic negatives; none by default.
    """

    SYNONYMS: ClassVar = {
        "temperature": "student_temperature",
        "temperature_q": "student_temperature",
        "temperature_k": "teacher_temperature",
    }
    """Of solo-learn's methods."""

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


def is_queued(kwargs: Any) -> bool:
    """Whether ``method_kwargs`` ask for a queue."""
    contrasted = kwargs.loss == "contrastive" and kwargs.negatives == "queue"
    return bool(kwargs.loss == "seed" or contrasted)


def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
    """Gives a queue that is needed and has no size one that suits the training set.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        images: training images; by default they are counted if need be.
    """
    if is_queued(cfg.method_kwargs):
        fill_from_data(cfg, {"queue_size": queue(65536)}, images)
    fill_num_hard(cfg)


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other.

    Raises:
        ConfigError: naming the first that does not fit.
    """
    kwargs = cfg.method_kwargs
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
    mixtures = mixes(kwargs.mixing)
    estimated = {"tau_plus": kwargs.tau_plus, "beta": kwargs.beta, "mixing": mixtures}
    named = next((name for name, value in estimated.items() if value), None)
    if kwargs.loss != "contrastive" and named is not None:
        raise ConfigError(
            f"method_kwargs.{named}",
            estimated[named],
            f"loss={kwargs.loss} has no negatives",
            "take loss=contrastive, or leave it out",
        )
    check_num_hard(kwargs)
    return cfg
