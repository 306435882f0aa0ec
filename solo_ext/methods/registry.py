"""The table of methods, and what their settings share.

Beside it stand the checks of what a method requires of the config (:func:`require_indices`, ...),
defaults that follow the number of training images (:func:`fill_from_data`), and warnings of
settings that do nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from solo_ext.core.errors import ConfigError
from solo_ext.core.registry import Registry
from solo_ext.core.types import Section

logger = logging.getLogger("solo_ext.methods")
METHODS: Registry[Any] = Registry("method")
K = TypeVar("K", bound=Section)


def fill_method_kwargs(cfg: DictConfig, kwargs_type: type[Section]) -> DictConfig:
    """Checks ``method_kwargs`` and writes its defaults into ``cfg``.

    Called by each method's ``add_and_assert_specific_cfg``, so that upstream's own scripts
    refuse a misspelt key too.

    Raises:
        ConfigError: unknown key, missing key, or value out of range.
    """
    from solo_ext.config.check import check_method_kwargs

    given = OmegaConf.to_container(cfg, resolve=True).get("method_kwargs")  # type: ignore[union-attr]
    cfg.method_kwargs = check_method_kwargs(kwargs_type, given or {}).model_dump()
    return cfg


def typed_kwargs(section: DictConfig, kwargs_type: type[K]) -> K:
    """Settings that :func:`fill_method_kwargs` has checked and filled in, as their own class.

    Args:
        section: ``cfg.method_kwargs``, or a section of it.
        kwargs_type: its class.
    """
    return kwargs_type.model_validate(OmegaConf.to_container(section, resolve=True))


def require_two_views(cfg: DictConfig, small: bool = False) -> None:
    """Refuses anything but two large crops.

    Args:
        cfg: the config.
        small: whether small crops are allowed besides.

    Raises:
        ConfigError: another number of large crops, or small crops that are not allowed.
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
    """Whether batches carry the indices of their samples; with DALI this is an option."""
    return bool(cfg.data.get("format") != "dali" or _encoded_indices(cfg))


def require_indices(cfg: DictConfig, purpose: str) -> None:
    """Refuses data without the true index of every sample.

    Args:
        cfg: the config.
        purpose: what the method does with them; part of the message.

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


IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
SHARE = 8
"""A queue, support set or table of prototypes has at most one row per this many images."""
_DOWNLOADED = {"cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000}
"""Data sets that solo-learn's script downloads after it has made the method: training images."""

Size = Callable[[int, int], int | list[int]]
"""Computes a default from the number of training images and the batch size."""


def clusters(*published: int) -> Size:
    """The numbers published for ImageNet, in proportion to the images; at least 2."""
    return lambda images, batch: [max(2, round(k * images / IMAGENET)) for k in published]


def queue(published: int) -> Size:
    """The published rows, at most one per ``SHARE`` images, in whole batches and at least one."""
    return lambda images, batch: min(published, max(1, images // SHARE // batch) * batch)


def prototypes(published: int) -> Size:
    """The published number, at most one per ``SHARE`` images; at least 2."""
    return lambda images, batch: min(published, max(2, images // SHARE))


def fill_from_data(cfg: DictConfig, sizes: Mapping[str, Size], images: int | None) -> None:
    """Sets the keys of ``method_kwargs`` that are null, and logs them in one line.

    A run that starts from another run's checkpoint takes the sizes recorded beside it.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        sizes: by dotted key of ``method_kwargs``.
        images: number of training images; counted by default where a key needs it.

    Raises:
        ConfigError: there are no images to count.
    """
    kwargs = cfg.method_kwargs
    absent = {k: size for k, size in sizes.items() if OmegaConf.select(kwargs, k) is None}
    if not absent:
        return
    found = {k: v for k in absent if (v := _recorded(cfg, k)) is not None}
    source = "the checkpoint's run"
    if found.keys() != absent.keys():
        count = num_training_images(cfg.data) if images is None else images
        source = f"{count:,} training images"
        batch = cfg.optimizer.batch_size
        found = {k: found.get(k) or size(count, batch) for k, size in absent.items()}
    for key, value in found.items():
        OmegaConf.update(kwargs, key, value)
    listed = ", ".join(f"{key}={value}" for key, value in found.items())
    rank_zero_only(logger.info)(f"{cfg.method}: {listed} from {source}")


def num_training_images(data: Mapping[str, Any]) -> int:
    """Counts the training images of solo-learn's script, which opens them after making the method.

    Args:
        data: the config's section ``data``; keys that the script does not read are ignored.

    Raises:
        ConfigError: they cannot be read.
    """
    from solo_ext.config.check import known_keys, validated
    from solo_ext.config.schema import Images
    from solo_ext.data.images import open_images

    known = _DOWNLOADED.get(data["dataset"])
    if known is not None:
        return known
    given = known_keys(Images, data) | {"holdout": None, "unreadable": "refuse"}
    return len(open_images(validated(Images, given, prefix="data"), "train"))


def _recorded(cfg: DictConfig, key: str) -> int | list[int] | None:
    """Reads a size from the config beside the checkpoint this run starts from, if it is there."""
    checkpoint = cfg.get("resume_from_checkpoint")
    try:
        held = json.loads(Path(checkpoint or "").with_name("args.json").read_text())
        value: Any = held["method_kwargs"] if held["method"] == cfg.method else None
        # Look keys up without resolving: interpolations in another run's file are not trusted.
        for name in key.split("."):
            value = value[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = value if isinstance(value, list) else [value]
    return value if numbers and all(type(n) is int and n > 0 for n in numbers) else None


UNREAD_ALPHA = "the loss does not read the clusters' concentrations"
"""Why ``clusters.alpha`` is idle where only the clusters' means or members are used."""


def warn_of_idle_settings(cfg: DictConfig, kwargs_type: type[Any], idle: Mapping[str, str]) -> None:
    """Warns in one line of settings that were changed although nothing reads them.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        kwargs_type: the class of these; a setting at its default is not reported.
        idle: why nothing reads a setting, by its name; a section's name covers all in it.
    """
    changed = _changed(cfg.method_kwargs, kwargs_type)
    reasons: dict[str, list[str]] = {}
    for name, reason in idle.items():
        for key in changed:
            if key == name or key.startswith(f"{name}."):
                reasons.setdefault(reason, []).append(f"method_kwargs.{key}")
    if reasons:
        listed = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
        logger.warning(f"{cfg.method}: settings without effect on training: {listed}")


def idle_in_projector(kwargs: Any, batch_norm: str = "proj_batch_norm") -> dict[str, str]:
    """Settings of the projector's hidden layers, which are idle if it has none.

    Args:
        kwargs: ``method_kwargs``.
        batch_norm: name of the setting that normalises the hidden layers.
    """
    if kwargs.proj_layers > 1:
        return {}
    return dict.fromkeys(("proj_hidden_dim", batch_norm), "proj_layers=1 has no hidden layer")


def warn_of_the_floor(
    section: str, tau_plus: float, beta: float, temperature: float, dim: int, watch: str = ""
) -> None:
    """Warns if the debiased estimate can be expected to be clamped for most anchors.

    Args:
        section: where in the config the settings stand.
        tau_plus: in [0, 1); 0 never warns.
        beta: 0 or more.
        temperature: above 0.
        dim: D of the embeddings.
        watch: metric that shows the share of clamped anchors, if the method logs one.
    """
    # The test is whether independent directions and a positive at cosine 0.9 already clamp the
    # estimate: then a trained backbone will too.
    exponent = (1 + 2 * beta) / (2 * dim * temperature**2) - 0.9 / temperature
    share = math.exp(min(exponent, 0.0))
    if tau_plus > share:
        logger.warning(
            f"{section}.tau_plus={tau_plus} is large for temperature={temperature}: most anchors "
            "will sit on the floor and get no gradient from their negatives"
            + (f" (watch {watch})" if watch else "")
            + f"; take tau_plus below {share:.2g} or a higher temperature"
        )


def _changed(kwargs: DictConfig, kwargs_type: type[Section]) -> list[str]:
    given: Any = OmegaConf.to_container(kwargs, resolve=True)
    required = {n: given[n] for n, f in kwargs_type.model_fields.items() if f.is_required()}
    return _differing(given, kwargs_type(**required).model_dump())


def _differing(
    given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Dotted keys of the values that differ from their defaults."""
    found = []
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            found += _differing(value, default, f"{prefix}{name}.")
        elif value != default:
            found.append(f"{prefix}{name}")
    return found
