"""The table of methods, and what every method of the plugin declares."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext.errors import ConfigError
from solo_ext.registry import Registry

METHODS: Registry[type[Any]] = Registry("method")


def fill_method_kwargs(cfg: DictConfig, kwargs_type: type) -> DictConfig:
    """Checks ``method_kwargs`` and writes its defaults into ``cfg``.

    Called by each method's ``add_and_assert_specific_cfg``, so that upstream's own scripts
    refuse a misspelt key too.

    Raises:
        ConfigError: unknown key, missing key, or value out of range.
    """
    # pydantic is not needed to register a method.
    from solo_ext.config.check import check_method_kwargs

    given = OmegaConf.to_container(cfg, resolve=True).get("method_kwargs")  # type: ignore[union-attr]
    cfg.method_kwargs = check_method_kwargs(kwargs_type, given or {})
    return cfg


def require_two_views(cfg: DictConfig) -> None:
    """Refuses anything but two large crops.

    Raises:
        ConfigError: another number of large crops, or any small crop.
    """
    large, small = cfg.data.num_large_crops, cfg.data.num_small_crops
    if (large, small) != (2, 0):
        raise ConfigError(
            "augmentations",
            f"{large} large and {small} small crops",
            f"{cfg.method} compares two views",
            "give num_crops: 2 in all, of one crop_size",
        )
