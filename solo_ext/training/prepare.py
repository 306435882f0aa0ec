"""Everything that is checked and filled in before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run
from solo_ext.data.datasets import Images, class_names, open_images
from solo_ext.errors import ConfigError, nearest
from solo_ext.host.backbones import small_image_kwargs, unknown_backbone
from solo_ext.plugin import register

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
_OPTIMIZER_KWARGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": None, "dampening": None},
    "lars": {
        "momentum": 0.9,
        "eta": 1e-3,
        "clip_lr": False,
        "exclude_bias_n_norm": False,
        "nesterov": None,
        "dampening": None,
        "eps": None,
    },
    "adam": {"betas": None, "eps": None, "amsgrad": None},
    "adamw": {"betas": [0.9, 0.999], "eps": None, "amsgrad": None},
}
BASE_BATCH = 256


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        given: the config as checked, learning rates for batch 256; what a resumed run reads.
        cfg: the config as methods take it, learning rates scaled.
        train: training images.
        val: validation images, or ``None``.
        method: the class.
    """

    given: dict[str, Any]
    cfg: DictConfig
    train: Images
    val: Images | None
    method: type[Any]


def prepare(config: Mapping[str, Any]) -> Prepared:
    """Checks a composed config against schema, host, method and data.

    Args:
        config: a plain mapping such as :func:`solo_ext.config.compose.compose` gives.

    Raises:
        ConfigError: anything that would fail or silently do something else.
        HostError: solo-learn is missing.
    """
    given = check_run(config)
    register()
    loaded = host.load()
    method = _method(loaded, given["method"])
    given["method_kwargs"] = _method_kwargs(given, method)
    given["momentum"] = _momentum(given, method)
    _backbone(loaded, given)
    _refuse_the_unsupported(given)
    given["optimizer"]["kwargs"] = _optimizer_kwargs(given["optimizer"])
    _count_crops(given)
    train = open_images(given["data"], "train")
    val = None if given["data"]["val_path"] is None else open_images(given["data"], "val")
    given["data"]["num_classes"] = CLASSES.get(given["data"]["dataset"]) or max(
        1, len(class_names(train))
    )
    if val is not None and given["data"]["dataset"] == "custom" and not given["data"]["no_labels"]:
        _same_classes(train, val, given["data"]["val_path"])
    return Prepared(given, _as_methods_take_it(given), train, val, method)


def world_size(config: Mapping[str, Any]) -> int:
    """Number of processes that a config asks for; ``auto`` counts the machine's accelerators."""
    devices = config["devices"]
    if isinstance(devices, list):
        count = len(devices)
    elif isinstance(devices, int):
        count = devices
    elif devices.strip() in ("auto", "-1"):
        import torch

        count = max(torch.cuda.device_count(), 1) if config["accelerator"] != "cpu" else 1
    else:
        words = [w for w in devices.split(",") if w.strip()]
        if not words or not all(w.strip().isdigit() for w in words):
            raise ConfigError(
                "devices", devices, "not a number of devices", "give a number, a list, or auto"
            )
        count = int(words[0]) if len(words) == 1 else len(words)
    return count * int(config["num_nodes"])


def _as_methods_take_it(given: dict[str, Any]) -> DictConfig:
    cfg = OmegaConf.create(given)
    scale = cfg.optimizer.batch_size * world_size(given) / BASE_BATCH
    cfg.optimizer.lr *= scale
    cfg.optimizer.classifier_lr *= scale
    if given["momentum"] is None:
        del cfg["momentum"]
    for aug in cfg.augmentations:
        # main reads these with a default of its own, which a null would hide.
        for key in ("mean", "std"):
            if aug[key] is None:
                del aug[key]
    return cfg


def _method(loaded: host.Host, name: str) -> type[Any]:
    usable = {n: m for n, m in loaded.methods.items() if n not in ("base", "linear")}
    if name in usable:
        return usable[name]
    if name in host.BUILTIN_KWARGS:
        raise ConfigError(
            "method",
            name,
            f"solo-learn {loaded.info.generation} does not have it, only its main branch does",
            "put a checkout of main on PYTHONPATH, or choose another method",
        )
    raise ConfigError("method", name, "unknown method", nearest(name, usable, show=40))


def _method_kwargs(given: dict[str, Any], method: type[Any]) -> dict[str, Any]:
    kwargs_type = getattr(method, "kwargs_type", None) or host.BUILTIN_KWARGS.get(given["method"])
    if kwargs_type is None:
        return dict(given["method_kwargs"])
    return check_method_kwargs(kwargs_type, given["method_kwargs"])


def _momentum(given: dict[str, Any], method: type[Any]) -> dict[str, Any] | None:
    from solo_ext.config.schema import Momentum

    section: dict[str, Any] | None = given["momentum"]
    if not issubclass(method, host.BaseMomentumMethod):
        if section is not None:
            raise ConfigError(
                "momentum",
                section,
                f"{given['method']} has no momentum backbone",
                "remove the section, on the command line with ~momentum",
            )
        return None
    section = section or Momentum().model_dump()
    if section["base_tau"] > section["final_tau"]:
        raise ConfigError(
            "momentum.base_tau",
            section["base_tau"],
            f"above momentum.final_tau={section['final_tau']}",
            "the average may only slow down: base_tau <= final_tau",
        )
    return section


def _backbone(loaded: host.Host, given: dict[str, Any]) -> None:
    name = given["backbone"]["name"]
    if name not in loaded.backbones:
        raise unknown_backbone(name, loaded.backbones)
    given["backbone"]["kwargs"] = small_image_kwargs(
        name, given["backbone"]["kwargs"], given["augmentations"][0]["crop_size"]
    )


def _refuse_the_unsupported(given: Mapping[str, Any]) -> None:
    if (given["auto_umap"] or {}).get("enabled"):
        raise ConfigError(
            "auto_umap.enabled",
            True,
            "maps are not drawn while training here",
            "use solo-learn's own main_pretrain.py for them, or remove it",
        )


def _optimizer_kwargs(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    known = _OPTIMIZER_KWARGS[optimizer["name"]]
    for key, value in optimizer["kwargs"].items():
        if key not in known:
            raise ConfigError(f"optimizer.kwargs.{key}", value, "unknown key", nearest(key, known))
    defaults = {key: value for key, value in known.items() if value is not None}
    return defaults | dict(optimizer["kwargs"])


def _count_crops(given: dict[str, Any]) -> None:
    sizes = [a["crop_size"] for a in given["augmentations"]]
    counts = [a["num_crops"] for a in given["augmentations"]]
    for a in given["augmentations"]:
        low, high = a["rrc"]["crop_min_scale"], a["rrc"]["crop_max_scale"]
        if low > high:
            raise ConfigError(
                "augmentations.rrc.crop_min_scale",
                low,
                f"above crop_max_scale={high}",
                "give a smaller one",
            )
    large = sum(c for s, c in zip(sizes, counts, strict=True) if s == sizes[0])
    given["data"]["num_large_crops"] = large
    given["data"]["num_small_crops"] = sum(counts) - large
    if large != 2 and given["method"] not in ("wmse", "mae"):
        own = getattr(host.load().methods[given["method"]], "kwargs_type", None)
        if own is None:
            raise ConfigError(
                "augmentations",
                f"{large} large crops",
                f"{given['method']} of solo-learn takes two",
                "give num_crops: 2 in all, of one crop_size",
            )


def _same_classes(train: Images, val: Images, path: str) -> None:
    ours, theirs = class_names(train), class_names(val)
    extra = sorted(set(theirs) - set(ours))
    if extra:
        raise ConfigError(
            "data.val_path",
            path,
            f"class {extra[0]!r} is not among the training classes",
            f"training has {', '.join(ours[:12])}",
        )
    if ours != theirs:
        missing = sorted(set(ours) - set(theirs))
        raise ConfigError(
            "data.val_path",
            path,
            f"class folder {missing[0]!r} is missing, which would shift the labels",
            "add the folder, it may hold a single image",
        )
