"""Settings of the methods that compare assignments to prototypes."""

from __future__ import annotations

from typing import ClassVar, Literal

from omegaconf import DictConfig

from solo_ext.config.types import (
    PositiveFloat,
    PositiveInt,
    Probability,
    method_kwargs,
)
from solo_ext.methods.data_sizes import fill_from_data, prototypes


@method_kwargs
class PrototypeKwargs:
    """What :class:`solo_ext.methods.ProtoSEED` and :class:`solo_ext.methods.ProtoCPC` share.

    Attributes:
        num_prototypes: K; null: 65,536, up to an eighth of the training images.
        student_temperature: above 0.
        teacher_temperature: above 0; of Sinkhorn-Knopp its regularisation.
        assignment: ``sinkhorn``: balanced over the batch; ``softmax``.
        sinkhorn_iterations: 1 or more.
        prior_momentum: in [0, 1], share of the old prior in the new one.
        prior_order: whether the loss takes the prior that already contains its batch
            (``before_loss``, as published) or the one before (``after_loss``).
        loss: ``protocpc``, or ``ce``: soft cross-entropy, which is ProtoCPC with a flat prior.
        compute_dtype: of products with prototypes; sums and exponentials stay in fp32.
    """

    SYNONYMS: ClassVar = {
        "temperature": "student_temperature",
        "sk_epsilon": "teacher_temperature",
        "sk_iters": "sinkhorn_iterations",
    }
    """Of solo-learn's methods."""

    num_prototypes: PositiveInt | None = None
    student_temperature: PositiveFloat = 0.1
    teacher_temperature: PositiveFloat = 0.04
    assignment: Literal["sinkhorn", "softmax"] = "sinkhorn"
    sinkhorn_iterations: PositiveInt = 3
    prior_momentum: Probability = 0.9
    prior_order: Literal["before_loss", "after_loss"] = "before_loss"
    loss: Literal["protocpc", "ce"] = "protocpc"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


def fill_num_prototypes(cfg: DictConfig, images: int | None = None) -> None:
    """Gives prototypes that have no number one that suits the training set.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        images: training images; by default they are counted if need be.
    """
    fill_from_data(cfg, {"num_prototypes": prototypes(65536)}, images)
