"""What can be evaluated (runs, checkpoints, timm models, raw pixels), and the shared settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data import resolve_model_data_config  # type: ignore[attr-defined]
from torch import nn

from solo_ext import host
from solo_ext.config.schema import (
    DALI,
    Backbone,
    Batch,
    CommonConfig,
    Crop,
    Format,
    Free,
    HuggingFace,
    Images,
    Streaming,
)
from solo_ext.core.errors import ConfigError, UserError, first_line
from solo_ext.core.types import FolderName, NonNegativeInt, PositiveInt, Section
from solo_ext.host.backbones import build_backbone
from solo_ext.host.names import PREFIX
from solo_ext.pretrained.files import state_digest
from solo_ext.pretrained.libraries import image_side
from solo_ext.pretrained.runs import load_pretrained

PIXELS = "pixels"


class EvalData(Section):
    """``data`` of an evaluation; by default as in pretraining.

    New paths are those of class folders, unless ``no_labels`` is true.

    >>> EvalData(train_path="images/train", val_path="images/val").format is None
    True
    """

    train_path: FolderName | None = None
    val_path: FolderName | None = None
    format: Format | None = None
    huggingface: HuggingFace | None = None
    streaming: Streaming | None = None
    unreadable: Literal["refuse", "skip"] | None = None
    no_labels: bool | None = None


class ModelRun(Section):
    """How a model is loaded and run; by default as in pretraining.

    Attributes:
        crop_size: side of the view in pixels; null: as in pretraining.
        batch_size: images of a batch; null: as in pretraining.
        num_workers: processes that read images; null: as in pretraining.
        device: ``auto`` is a GPU if there is one, else ``cpu``.
        pretrained: for models of timm: whether they get their weights, or drawn ones.
        model_seed: for models of timm: seed of drawn weights.
        model_kwargs: for models of timm: further arguments.

    >>> ModelRun(batch_size=64).device
    'auto'
    """

    dali: DALI | None = None
    crop_size: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    num_workers: NonNegativeInt | None = None
    device: str = "auto"
    pretrained: bool = True
    model_seed: NonNegativeInt = 0
    model_kwargs: Free = {}


class EvalRun(ModelRun):
    """Settings that every protocol shares; by default as in pretraining.

    >>> EvalRun(data={"val_path": "images/val"}, batch_size=64).device
    'auto'
    """

    data: EvalData = EvalData()
    out: FolderName | None = None
    features_dir: FolderName | None = None


@dataclass(frozen=True)
class Model:
    """A backbone to evaluate.

    Attributes:
        name: the path or model name that was given.
        backbone: a network on the CPU that maps images (B, 3, H, W) to features (B, features_dim).
        cfg: the config that it was trained with; for timm and ``pixels``, one without paths.
        checkpoint: name of the checkpoint file, or a description if there is none.
        digest: digest of the weights.
        epoch: epochs trained, ``None`` if unknown.
        folder: where records and features are written.
        method: the method in training; ``None`` for a model that was loaded.

    >>> model = open_model(PIXELS, EvalRun(data={"train_path": "train", "val_path": "val"}))
    >>> model.features_dim, model.digest, str(model.folder)
    (3072, 'pixels', 'evaluations/pixels')
    """

    name: str
    backbone: nn.Module
    features_dim: int
    cfg: CommonConfig
    checkpoint: str
    digest: str
    epoch: int | None
    folder: Path
    method: nn.Module | None = None


def open_model(name: str, settings: EvalRun) -> Model:
    """Loads what is to be evaluated: a run directory, a checkpoint, a model of timm or ``pixels``.

    Raises:
        UserError: no such run or model, or settings that do not apply to it.

    >>> settings = EvalRun(data={"train_path": "train", "val_path": "val"}, crop_size=8)
    >>> model = open_model(PIXELS, settings)
    >>> model.backbone(torch.zeros(4, 3, 8, 8)).shape
    torch.Size([4, 192])
    """
    timm = name.startswith(PREFIX) and not Path(name).exists()
    if (timm or name == PIXELS) and not (settings.data.train_path and settings.data.val_path):
        key = "data.val_path" if settings.data.train_path else "data.train_path"
        raise ConfigError(key, None, f"{name} was trained on no images here", "give both folders")
    if timm:
        return _timm(name, settings)
    for key in ("pretrained", "model_seed", "model_kwargs"):
        value = getattr(settings, key)
        if value != EvalRun.model_fields[key].default:
            raise ConfigError(key, value, f"{name!r} is no model of timm", "leave it out")
    if name == PIXELS:
        size = settings.crop_size or 32
        cfg, folder = _config(PIXELS, {}, size), _folder(settings, PIXELS)
        return Model(name, nn.Flatten(), 3 * size * size, cfg, PIXELS, PIXELS, None, folder)
    found = load_pretrained(Path(name))
    return Model(
        name,
        found.backbone,
        found.features_dim,
        found.cfg,
        found.checkpoint.name,
        found.digest,
        found.epoch,
        Path(settings.out) if settings.out else found.checkpoint.parent,
    )


def _timm(name: str, settings: EvalRun) -> Model:
    kwargs = dict(settings.model_kwargs)
    if "pretrained" in kwargs:
        raise ConfigError("model_kwargs.pretrained", kwargs["pretrained"], "set pretrained itself")
    given = {**kwargs, "pretrained": settings.pretrained}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.model_seed)
        try:
            backbone, width = build_backbone(
                host.load().backbones, name, given, method=None, dataset="custom"
            )
        except ConfigError:
            raise
        except Exception as error:
            if not settings.pretrained:
                raise
            raise UserError(
                f"timm cannot get the weights of {name!r}: {first_line(error)}; pretrained=false "
                "takes random ones"
            ) from error
    config = resolve_model_data_config(backbone)  # type: ignore[no-untyped-call]
    view = {"mean": list(config["mean"]), "std": list(config["std"])}
    cfg = _config(name, kwargs, image_side(kwargs, config["input_size"][-1]), **view)
    tag = (getattr(backbone, "pretrained_cfg", None) or {}).get("tag")
    weights = (tag or "pretrained") if settings.pretrained else f"random-{settings.model_seed}"
    folder = _folder(settings, *name.split("/"), weights)
    digest = state_digest(backbone.state_dict())
    return Model(name, backbone, width, cfg, weights, digest, None, folder)


def _config(name: str, kwargs: dict[str, Any], size: int, **normalization: Any) -> CommonConfig:
    return CommonConfig(
        backbone=Backbone(name=name, kwargs=kwargs),
        data=Images(dataset="custom"),
        augmentations=[Crop(crop_size=size, **normalization)],
        optimizer=Batch(batch_size=64),
    )


def _folder(settings: EvalRun, *words: str) -> Path:
    return Path(settings.out) if settings.out else Path("evaluations") / "-".join(words)
