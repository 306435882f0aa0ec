"""The table of methods, and what every method of the plugin declares."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf

from solo_ext.core.errors import ConfigError
from solo_ext.core.registry import Registry

logger = logging.getLogger("solo_ext.methods")
METHODS: Registry[Any] = Registry("method")
K = TypeVar("K")


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


def typed_kwargs(section: DictConfig, kwargs_type: type[K]) -> K:
    """Settings that :func:`fill_method_kwargs` has checked and filled in, as their own class.

    Args:
        section: ``cfg.method_kwargs``, or a section of it.
        kwargs_type: its class, made by :func:`solo_ext.config.types.method_kwargs`.
    """
    return _instance(kwargs_type, OmegaConf.to_container(section, resolve=True))  # type: ignore[arg-type]


def _instance(kwargs_type: type[K], values: Mapping[str, Any]) -> K:
    hints = get_type_hints(kwargs_type)
    return kwargs_type(
        **{
            name: _instance(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
            for name, value in values.items()
        }
    )


def require_two_views(cfg: DictConfig, small: bool = False) -> None:
    """Refuses anything but two large crops.

    Args:
        cfg: the config.
        small: whether small crops beside them are welcome.

    Raises:
        ConfigError: another number of large crops, or a small crop that is not welcome.
    """
    counts = cfg.data.num_large_crops, cfg.data.num_small_crops
    if counts[0] != 2 or (counts[1] and not small):
        remedy = "give num_crops: 2 in all, of one crop_size"
        if small:
            remedy = (
                "give the largest crop_size num_crops: 2 in all; smaller ones may be any number"
            )
        raise ConfigError(
            "augmentations",
            f"{counts[0]} large and {counts[1]} small crops",
            f"{cfg.method} compares two views",
            remedy,
        )


def has_indices(cfg: DictConfig) -> bool:
    """Whether a batch tells which samples it is of; DALI's does by option only."""
    return bool(cfg.data.get("format") != "dali" or _encoded_indices(cfg))


def require_indices(cfg: DictConfig, purpose: str) -> None:
    """Refuses data without the true index of every sample.

    Args:
        cfg: the config.
        purpose: what the method does with them.

    Raises:
        ConfigError: DALI without indices.
    """
    if not has_indices(cfg):
        raise ConfigError(
            "dali.encode_indexes_into_labels",
            _encoded_indices(cfg),
            f"{cfg.method} {purpose} by sample index, which DALI's batches then lack",
            "set it to true",
        )


def _encoded_indices(cfg: DictConfig) -> Any:
    return (cfg.get("dali") or {}).get("encode_indexes_into_labels")
