"""What solo-learn's own methods would only find out while they train."""

from __future__ import annotations

import logging
from typing import Any

from solo_ext import host
from solo_ext.config.hardware import world_size
from solo_ext.core.errors import ConfigError

logger = logging.getLogger(__name__)
_NO_SMALL_CROPS = {
    "main": {"all4one"},
    "1.0.2": set(host.BUILTIN_KWARGS) - {"byol", "simclr", "wmse"},
}
_QUEUED = ("all4one", "mocov2plus", "nnbyol", "nnclr", "nnsiam", "ressl")


def check_builtin(given: dict[str, Any], images: int) -> None:
    """Refuses settings with which a built-in method fails after it has started.

    Args:
        given: the checked config; a queue that is no multiple of the batch is shortened to one.
        images: number of training images.

    Raises:
        ConfigError: for example a queue that is smaller than the batch.
    """
    method, kwargs = given["method"], given["method_kwargs"]
    _small_crops(method, given["data"]["num_small_crops"])
    batch = given["optimizer"]["batch_size"]
    joined = batch * world_size(given)

    def refuse(key: str, problem: str, remedy: str) -> None:
        raise ConfigError(f"method_kwargs.{key}", kwargs[key], problem, remedy)

    if method in _QUEUED and kwargs["queue_size"] % joined:
        size = kwargs["queue_size"]
        if size < joined:
            refuse("queue_size", f"smaller than the batch, {joined} over all processes", "")
        kwargs["queue_size"] -= size % joined
        logger.warning(
            f"method_kwargs.queue_size: {kwargs['queue_size']} instead of {size}, since {method} "
            f"takes a multiple of the batch, {joined} over all processes"
        )
    if method == "swav" and 0 < kwargs["queue_size"] < joined:
        refuse("queue_size", f"smaller than the batch, {joined} over all processes", "or take 0")
    if method == "wmse":
        if given["data"]["num_large_crops"] < 2:
            raise ConfigError("augmentations", "1 large crop", "wmse compares two or more", "")
        size = kwargs["whitening_size"]
        if batch % size:
            refuse("whitening_size", f"does not divide the batch of {batch}", "take a divisor")
        if size <= kwargs["proj_output_dim"] and not kwargs["whitening_eps"]:
            refuse(
                "whitening_size",
                f"too few to whiten {kwargs['proj_output_dim']} dimensions",
                "take more than method_kwargs.proj_output_dim, or a whitening_eps above 0",
            )
    if method == "deepclusterv2":
        dali = given["dali"] if given["data"]["format"] == "dali" else None
        if dali and not dali["encode_indexes_into_labels"]:
            raise ConfigError(
                "dali.encode_indexes_into_labels",
                False,
                "deepclusterv2 looks samples up by index, which DALI's batches then lack",
                "set it to true",
            )
        clustered = images // joined * batch
        if not kwargs["num_prototypes"] or max(kwargs["num_prototypes"]) > clustered > 0:
            refuse(
                "num_prototypes",
                f"{clustered} images of each process are clustered",
                f"give a list of numbers up to {clustered}",
            )
    if method == "dino" and kwargs["warmup_teacher_temperature_epochs"] > given["max_epochs"]:
        refuse(
            "warmup_teacher_temperature_epochs",
            f"longer than the run, max_epochs={given['max_epochs']}",
            f"allowed: up to {given['max_epochs']}",
        )
    if method == "mae" and not given["backbone"]["name"].startswith("vit_"):
        raise ConfigError(
            "backbone.name",
            given["backbone"]["name"],
            "mae needs solo-learn's own vision transformers",
            "allowed: vit_tiny, vit_small, vit_base, vit_large",
        )
    if method == "supcon" and given["data"]["no_labels"]:
        raise ConfigError(
            "data.no_labels", True, "supcon learns from labels", "give class folders, or simclr"
        )


def check_large_crops(method: str, count: int) -> None:
    """Refuses other than two large crops for a method that is made for two.

    Args:
        method: a registered name.
        count: crops of the size of the first.

    Raises:
        ConfigError: solo-learn's own methods but W-MSE and MAE, and those of others that declare
            no settings, take two.
    """
    own = getattr(host.load().methods[method], "kwargs_type", None)
    if count != 2 and method not in ("wmse", "mae") and own is None:
        raise ConfigError(
            "augmentations",
            f"{count} large crops",
            f"{method} of solo-learn takes two",
            "give num_crops: 2 in all, of one crop_size",
        )


def _small_crops(method: str, count: int) -> None:
    generation = host.load().info.generation
    if count and method in _NO_SMALL_CROPS[generation]:
        raise ConfigError(
            "augmentations",
            f"{count} small crops",
            f"{method} of solo-learn {generation} takes large crops only",
            "give every entry the same crop_size",
        )
