"""solo-learn's own methods: their ``method_kwargs``, and checks for settings that make them fail.

The main branch fills in defaults without checking for unknown keys, and the release takes the
settings as arguments of its constructors. This module checks both, with the defaults of main.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from pydantic import create_model

from solo_ext import host
from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)

logger = logging.getLogger(__name__)
_QUEUED = ("all4one", "mocov2plus", "nnbyol", "nnclr", "nnsiam", "ressl")


Fields = dict[str, tuple[Any, Any]]
"""Type and default of each setting by name; ``...`` marks a setting that must be given."""
_PROJECTED: Fields = {"proj_hidden_dim": (PositiveInt, ...), "proj_output_dim": (PositiveInt, ...)}
_CONTRASTIVE: Fields = {**_PROJECTED, "temperature": (PositiveFloat, ...)}
_PREDICTED: Fields = {**_PROJECTED, "pred_hidden_dim": (PositiveInt, ...)}
_QUEUE: Fields = {"queue_size": (PositiveInt, 65536)}
_VICREG: Fields = {
    **_PROJECTED,
    "sim_loss_weight": (NonNegativeFloat, 25.0),
    "var_loss_weight": (NonNegativeFloat, 25.0),
    "cov_loss_weight": (NonNegativeFloat, 1.0),
}
_OF_METHODS: dict[str, Fields] = {
    "all4one": _CONTRASTIVE | _QUEUE | _PREDICTED,
    "barlow_twins": {
        **_PROJECTED,
        "lamb": (PositiveFloat, 0.0051),
        "scale_loss": (PositiveFloat, 0.024),
    },
    "byol": _PREDICTED,
    "deepclusterv2": {
        **_PROJECTED,
        "temperature": (PositiveFloat, 0.1),
        "num_prototypes": (list[PositiveInt], [3000, 3000, 3000]),
        "kmeans_iters": (PositiveInt, 10),
    },
    "dino": {
        **_PROJECTED,
        "num_prototypes": (PositiveInt, ...),
        "clip_grad": (NonNegativeFloat, 0),
        "freeze_last_layer": (NonNegativeInt, 1),
        "norm_last_layer": (bool, True),
        "use_bn_in_head": (bool, False),
        "student_temperature": (PositiveFloat, 0.1),
        "teacher_temperature": (PositiveFloat, 0.07),
        "warmup_teacher_temperature": (PositiveFloat, 0.04),
        "warmup_teacher_temperature_epochs": (NonNegativeInt, 0),
    },
    "mae": {
        "decoder_embed_dim": (PositiveInt, ...),
        "decoder_depth": (PositiveInt, ...),
        "decoder_num_heads": (PositiveInt, ...),
        "mask_ratio": (Probability, 0.75),
        "norm_pix_loss": (bool, False),
    },
    "mocov2plus": _CONTRASTIVE | _QUEUE,
    "mocov3": _CONTRASTIVE | _PREDICTED,
    "nnbyol": _PREDICTED | _QUEUE,
    "nnclr": _CONTRASTIVE | _QUEUE | _PREDICTED,
    "nnsiam": _PREDICTED | _QUEUE,
    "ressl": {
        **_PROJECTED,
        "temperature_q": (PositiveFloat, ...),
        "temperature_k": (PositiveFloat, ...),
        **_QUEUE,
        # Upstream's own configs set these here, but they are read from the section `momentum`.
        "base_tau_momentum": (Probability | None, None),
        "final_tau_momentum": (Probability | None, None),
        "momentum_classifier": (bool | None, None),
    },
    "simclr": _CONTRASTIVE,
    # Upstream's own config sets a temperature, but its method never reads it.
    "simsiam": {**_PREDICTED, "temperature": (PositiveFloat, 0.2)},
    "supcon": _CONTRASTIVE,
    "swav": {
        **_CONTRASTIVE,
        "queue_size": (NonNegativeInt, 65536),
        "num_prototypes": (PositiveInt, 3000),
        "sk_epsilon": (PositiveFloat, 0.05),
        "sk_iters": (PositiveInt, 3),
        "freeze_prototypes_epochs": (NonNegativeInt, 1),
        "epoch_queue_starts": (NonNegativeInt, 15),
    },
    "vibcreg": {**_VICREG, "cov_loss_weight": (NonNegativeFloat, 200.0), "iternorm": (bool, False)},
    "vicreg": _VICREG,
    "wmse": {
        **_PROJECTED,
        "whitening_iters": (PositiveInt, 1),
        "whitening_size": (PositiveInt, 256),
        "whitening_eps": (NonNegativeFloat, 0.0),
    },
}
BUILTIN_KWARGS: dict[str, type[Section]] = {
    name: create_model(f"{name}_settings", __base__=Section, **cast(Any, fields))
    for name, fields in _OF_METHODS.items()
}
_NO_SMALL_CROPS = {"main": {"all4one"}, "1.0.2": set(BUILTIN_KWARGS) - {"byol", "simclr", "wmse"}}


def check_large_crops(method: str, count: int) -> None:
    """Refuses a wrong number of large crops: W-MSE takes two or more, MAE any number, others two.

    >>> check_large_crops("simclr", 3)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: ...: simclr of solo-learn takes two; give num_crops: 2 ...
    """
    own = getattr(host.load().methods[method], "kwargs_type", None)
    if own is None and method != "mae" and (count < 2 if method == "wmse" else count != 2):
        raise ConfigError(
            "augmentations",
            f"{count} large crops",
            f"{method} of solo-learn takes two",
            "give num_crops: 2 in all, of one crop_size",
        )


def check_builtin(run: RunConfig, images: int) -> None:
    """Refuses settings that would make a built-in method fail during training.

    Args:
        run: the checked config; its queue size is rounded down to a multiple of the batch.
        images: number of training images.

    Raises:
        ConfigError: for example a queue smaller than the batch.

    >>> from solo_ext.config.check import check_method_kwargs, check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/mocov2plus", ["optimizer.batch_size=64"]))
    >>> run.method_kwargs = check_method_kwargs(BUILTIN_KWARGS["mocov2plus"], run.method_kwargs)
    >>> run.data.num_large_crops = 2
    >>> check_builtin(run, images=1400)
    >>> run.method_kwargs.queue_size
    960
    """
    method: str = run.method
    kwargs: Any = run.method_kwargs
    generation = host.load().info.generation
    batch, joined = run.optimizer.batch_size, run.optimizer.batch_size * run.world_size
    large, small = run.data.num_large_crops or 0, run.data.num_small_crops or 0

    def refuse(key: str, problem: str, remedy: str) -> None:
        raise ConfigError(f"method_kwargs.{key}", getattr(kwargs, key), problem, remedy)

    if small and method in _NO_SMALL_CROPS[generation]:
        problem = f"{method} of solo-learn {generation} takes large crops only"
        raise ConfigError(
            "augmentations", f"{small} small crops", problem, "give every entry the same crop_size"
        )
    check_large_crops(method, large)
    if method in (*_QUEUED, "swav") and 0 < kwargs.queue_size < joined:
        refuse("queue_size", f"smaller than the batch, {joined} over all processes", "take more")
    if method in _QUEUED and kwargs.queue_size % joined:
        size, kwargs.queue_size = kwargs.queue_size, kwargs.queue_size // joined * joined
        logger.warning(
            f"method_kwargs.queue_size: {kwargs.queue_size} instead of {size}, since {method} "
            f"takes a multiple of the batch, {joined} over all processes"
        )
    if method == "wmse":
        size = kwargs.whitening_size
        if batch % size:
            refuse("whitening_size", f"does not divide the batch of {batch}", "take a divisor")
        if size <= kwargs.proj_output_dim and not kwargs.whitening_eps:
            refuse(
                "whitening_size",
                f"too few to whiten {kwargs.proj_output_dim} dimensions",
                "take more than method_kwargs.proj_output_dim, or a whitening_eps above 0",
            )
    if method == "deepclusterv2":
        if run.data.format == "dali" and run.dali and not run.dali.encode_indexes_into_labels:
            raise ConfigError(
                "dali.encode_indexes_into_labels",
                False,
                "deepclusterv2 looks samples up by index, which DALI's batches then lack",
                "set it to true",
            )
        clustered = images // joined * batch
        if not kwargs.num_prototypes or max(kwargs.num_prototypes) > clustered > 0:
            refuse(
                "num_prototypes",
                f"{clustered} images of each process are clustered",
                f"give a list of numbers up to {clustered}",
            )
    if method == "dino" and kwargs.warmup_teacher_temperature_epochs > run.max_epochs:
        refuse(
            "warmup_teacher_temperature_epochs",
            f"longer than the run, max_epochs={run.max_epochs}",
            f"allowed: up to {run.max_epochs}",
        )
    if method == "mae" and not run.backbone.name.startswith("vit_"):
        raise ConfigError(
            "backbone.name",
            run.backbone.name,
            "mae needs solo-learn's own vision transformers",
            "allowed: vit_tiny, vit_small, vit_base, vit_large",
        )
    if method == "supcon" and run.data.no_labels:
        raise ConfigError(
            "data.no_labels", True, "supcon learns from labels", "give class folders, or simclr"
        )
