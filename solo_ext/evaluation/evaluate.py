"""Evaluating a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from solo_ext.config.check import validated
from solo_ext.config.schema import Section
from solo_ext.config.types import NonNegativeInt, PositiveInt
from solo_ext.data.datasets import Images, class_names, open_images
from solo_ext.data.loaders import fixed_loader
from solo_ext.data.transforms import STATISTICS
from solo_ext.errors import ConfigError, nearest
from solo_ext.evaluation.features import extract_features
from solo_ext.evaluation.protocols import PROTOCOLS, Features
from solo_ext.pretrained.runs import Pretrained, load_pretrained

Progress = Callable[[str, int, int], None]
_TORCHVISION = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "stl10": "stl10_binary",
}
"""The folder by which torchvision's data sets are known."""


class EvalData(Section):
    """``data`` of an evaluation; what is not given is as in pretraining."""

    train_path: str | None = None
    val_path: str | None = None
    format: Literal["image_folder", "dali"] | None = None


class EvalDALI(Section):
    """``dali`` of an evaluation; what is not given is as in pretraining, or ``gpu``."""

    device: Literal["cpu", "gpu"] | None = None


class EvalRun(Section):
    """Settings that every protocol shares."""

    data: EvalData = EvalData()
    dali: EvalDALI = EvalDALI()
    crop_size: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    num_workers: NonNegativeInt | None = None
    device: str = "auto"


def evaluate(
    path: Path,
    protocol: str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a run with one protocol, its backbone frozen and in eval mode.

    Args:
        path: as :func:`solo_ext.pretrained.runs.load_pretrained` takes it.
        protocol: ``knn`` or ``linear``.
        settings: fields of the protocol, and of :class:`EvalRun`.
        progress: called with the split and the batches done and in all.

    Returns:
        A record: what was evaluated, on what, with which settings, and ``results``.

    Raises:
        UserError: wrong settings, or a path that is no run.
    """
    shared, own = _settings(protocol, dict(settings or {}))
    device = _device(shared.device)
    pretrained = load_pretrained(path)
    cfg = _evaluation_config(pretrained.cfg, shared)
    features = read_features(pretrained, cfg, device, shared.batch_size, progress)
    return {
        "protocol": protocol,
        "run": str(path),
        "checkpoint": pretrained.checkpoint.name,
        "checkpoint_sha256": pretrained.digest,
        "method": cfg.get("method"),
        "backbone": cfg["backbone"],
        "epoch": pretrained.epoch,
        "image_size": cfg["augmentations"][0]["crop_size"],
        "train": {"path": str(cfg["data"]["train_path"]), "images": len(features.train)},
        "test": {"path": str(cfg["data"]["val_path"]), "images": len(features.test)},
        "settings": own.model_dump(),
        "results": own.measure(features),
    }


def read_features(
    pretrained: Pretrained,
    cfg: Mapping[str, Any],
    device: str,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Features:
    """Features of both splits of ``cfg`` under its evaluation transform."""
    if cfg["data"].get("no_labels"):
        raise ConfigError(
            "data.train_path",
            cfg["data"]["train_path"],
            "the run was trained without labels, and an evaluation needs some",
            "give class folders with data.train_path=... data.val_path=...",
        )
    train, val = open_images(cfg["data"], "train"), open_images(cfg["data"], "val")
    if cfg["data"]["dataset"] not in STATISTICS:
        same_classes(train, val, str(cfg["data"]["val_path"]))
    parts: list[Any] = []
    for split, images in (("train", train), ("val", val)):
        loader = fixed_loader(cfg, images, batch_size=batch_size)
        report = None if progress is None else _reporter(progress, split)
        parts += extract_features(pretrained.backbone, loader, device=device, progress=report)
    return Features(*parts)


def same_classes(train: Images, val: Images, val_path: str) -> None:
    """Refuses class folders of validation whose numbers mean other classes than in training.

    Raises:
        ConfigError: a class that only one of the two has.
    """
    ours, theirs = class_names(train), class_names(val)
    extra = sorted(set(theirs) - set(ours))
    if extra:
        raise ConfigError(
            "data.val_path",
            val_path,
            f"class {extra[0]!r} is not among the training classes",
            nearest(extra[0], ours),
        )
    if ours != theirs:
        missing = sorted(set(ours) - set(theirs))
        raise ConfigError(
            "data.val_path",
            val_path,
            f"class folder {missing[0]!r} is missing, which would shift the labels",
            "add the folder, it may hold a single image",
        )


def _reporter(progress: Progress, split: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(split, done, total)


def _settings(protocol: str, settings: dict[str, Any]) -> tuple[EvalRun, Any]:
    from pydantic import TypeAdapter, create_model

    kind = PROTOCOLS[protocol]
    # One model of both, so that a misspelt key is compared with all that are valid.
    joint = create_model("Evaluation", __base__=(kind, EvalRun))
    checked = validated(TypeAdapter(joint), settings)
    values = checked.model_dump()
    own = kind.model_validate({k: values[k] for k in kind.model_fields})
    return EvalRun.model_validate({k: values[k] for k in EvalRun.model_fields}), own


def _evaluation_config(trained: Mapping[str, Any], shared: EvalRun) -> dict[str, Any]:
    data = {"fraction": -1, "format": "image_folder", "num_workers": 0, **trained["data"]}
    given = {k: v for k, v in shared.data.model_dump().items() if v is not None}
    data["format"] = given.pop("format", data["format"])
    if given:
        # Class folders of the user's own, unless torchvision's data set only moved; statistics
        # stay those of pretraining.
        inside = _TORCHVISION.get(data["dataset"])
        moved = inside is not None and all((Path(p) / inside).is_dir() for p in given.values())
        dataset = data["dataset"] if moved else "custom"
        data |= {"dataset": dataset, "no_labels": False, "fraction": -1} | given
    if shared.num_workers is not None:
        data["num_workers"] = shared.num_workers
    first = dict(trained["augmentations"][0])
    if data["dataset"] == "custom" and trained["data"]["dataset"] in STATISTICS:
        mean, std = STATISTICS[trained["data"]["dataset"]]
        first |= {"mean": list(mean), "std": list(std)}
    if shared.crop_size is not None:
        first["crop_size"] = shared.crop_size
    device = shared.dali.device or (trained.get("dali") or {}).get("device")
    return {**trained, "data": data, "augmentations": [first], "dali": {"device": device}}


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).cpu()
    except Exception as error:
        # torch answers in many ways: unknown, not built, not there, holding no values.
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(
            "device",
            name,
            str(error).splitlines()[0],
            f"allowed here: {', '.join(('auto', 'cpu', *gpus))}",
        ) from None
    return name
