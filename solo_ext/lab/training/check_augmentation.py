"""Which ways to augment go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solo_ext.core.errors import ConfigError

_PER_IMAGE = ("rand_augment", "auto_augment")


def check_augmentation(given: Mapping[str, Any]) -> None:
    """Refuses settings that the chosen pipeline would leave out.

    Raises:
        ConfigError: naming the setting.
    """
    data = given["data"]
    on_batch, dali = data["augmentation"] == "batch", data["format"] == "dali"
    for place, pipeline in enumerate(given["augmentations"]):
        for name in _PER_IMAGE:
            if pipeline[name] and (on_batch or dali):
                raise ConfigError(
                    f"augmentations.{place}.{name}",
                    pipeline[name],
                    "it works on single images, through torchvision",
                    "remove it, or take data.augmentation=image and a data.format other than dali",
                )
    if dali and on_batch:
        raise ConfigError(
            "data.augmentation", "batch", "DALI makes the crops itself", "take image with dali"
        )
    if dali and data["mix"]:
        raise ConfigError(
            "data.mix",
            data["mix"],
            "DALI's batches are not mixed",
            "remove it, or take another data.format",
        )
    if data["in_memory"] and not on_batch:
        raise ConfigError(
            "data.in_memory",
            True,
            "only data.augmentation=batch reads from memory",
            "take false, or data.augmentation=batch",
        )
