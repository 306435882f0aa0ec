"""Writes the backbone of a run for use elsewhere, and checks it by reading it back."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors.torch import save_file
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torchvision import models

from solo_ext.config.check import validated
from solo_ext.config.schema import Backbone
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import writing
from solo_ext.data.transforms import fixed_view
from solo_ext.host.names import PREFIX
from solo_ext.pretrained.exported import FETCHING, KEY, WEIGHTS, Metadata, load_exported
from solo_ext.pretrained.runs import Pretrained, load_pretrained

Format = Literal["timm", "safetensors", "torchvision", "detectron2"]
DEFAULT_NAMES: dict[Format, str] = {
    "timm": "export-timm",
    "safetensors": "backbone.safetensors",
    "torchvision": "backbone.pth",
    "detectron2": "backbone-detectron2.pkl",
}
"""Name of an export within the run directory, by format."""
TOLERANCE = 1e-6
"""Largest difference of features, relative to the largest feature or to 1 if that is smaller."""
_SIZES = ("tiny", "small", "base", "large")
_TIMM_NAMES = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    **{f"vit_{size}": f"vit_{size}_patch16_224" for size in _SIZES},
    **{f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in _SIZES},
    **{f"convnext_{size}": f"convnext_{size}" for size in _SIZES},
}
"""timm's names of models that may be the same network as a backbone of solo-learn."""
_RENAMED = {"groups": "cardinality", "width_per_group": "base_width"}
"""timm's names for arguments of torchvision's ResNets."""
_ONLY_OURS = ("small_stem", "zero_init_residual")
"""Arguments that timm does not have; comparing features shows whether they matter."""
_SOLO_HEADS = 12
"""Attention heads of solo-learn's MoCo v3 and MAE transformers up to base; no shape tells it."""
_DETECTORS_RESNETS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
"""torchvision's names of networks that detectron2 and mmdetection have too."""
_SIDES = {"cifar10": 32, "cifar100": 32, "stl10": 96}
"""Side of a data set's images in pixels, where all have the same."""
_NEXT = {f"layer{stage}": f"res{stage + 1}" for stage in range(1, 5)}


@dataclass(frozen=True)
class Export:
    """A finished export.

    Attributes:
        out: the folder for timm, or the file.
        metadata: the export's description of itself.
        difference: largest difference of the features after loading it back, relative as in
            :data:`TOLERANCE`.
        architecture: torchvision's name of the network, if it was exported under one.

    >>> about = Metadata.model_construct(features_dim=512)
    >>> print(Export(Path("resnet18"), about, difference=1e-6).load)
    solo_ext.load_exported("resnet18")
    """

    out: Path
    metadata: Metadata
    difference: float
    architecture: str | None = None

    @property
    def load(self) -> str:
        """Python code that loads the export, or settings that make a library load it."""
        if self.out.is_dir():
            return f"timm.create_model({json.dumps(f'local-dir:{self.out}')}, pretrained=True)"
        if self.out.suffix == ".pth":
            return f'model.backbone.body.load_state_dict(torch.load("{self.out}"))'
        if self.out.suffix == ".pkl" and self.architecture is not None:
            about = self.metadata
            return (
                f"MODEL.WEIGHTS {self.out} "
                f"{detectron2_settings(self.architecture, about.mean, about.std)}"
            )
        return f"solo_ext.load_exported({json.dumps(str(self.out))})"


def export(path: Path, form: Format, out: Path | None = None) -> Export:
    """Writes the backbone of a run, and checks that it gives the same features when read back.

    Unless features of random images equal those of the run to 1e-6, nothing is written. For the
    detection formats, the features compared are those of torchvision's ResNet with these weights.

    Args:
        path: of the run, as in :func:`~solo_ext.pretrained.runs.load_pretrained`.
        form: ``timm``, a folder for plain timm; ``safetensors``, one file, which
            :func:`~solo_ext.pretrained.exported.load_exported` reads, as it does that folder;
            ``torchvision``, weights for torchvision's detection models and for mmdetection;
            ``detectron2``, weights for detectron2.
        out: the folder or the file, which must not exist; ``None``: in the run directory.

    Raises:
        UserError: there is no run, the format cannot hold the backbone, or ``out`` is taken.

    >>> export(Path("nowhere"), "timm")
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    run = load_pretrained(path)
    target = run.checkpoint.parent / DEFAULT_NAMES[form] if out is None else out
    _check_place(target, form)
    metadata = _metadata(run)
    difference_of = _comparison(run.backbone, metadata.input_size)
    architecture = None
    try:
        with _placed(target) as scratch:
            if form == "timm":
                metadata, difference = _write_for_timm(
                    scratch, run.backbone, metadata, difference_of
                )
            elif form in ("torchvision", "detectron2"):
                compared = ((n, difference_of(twin)) for n, twin in torchvision_twins(run.backbone))
                found = next((pair for pair in compared if pair[1] <= TOLERANCE), None)
                if found is None:
                    raise UserError(
                        f"backbone {metadata.backbone.name!r} with {metadata.backbone.kwargs} on "
                        f"{metadata.dataset} is none of the ResNets that detection libraries "
                        "share; take --format timm or safetensors"
                    )
                architecture, difference = found
                _save_weights(run.backbone, scratch, detectron2=form == "detectron2")
            else:
                _write_weights(scratch, run.backbone, metadata)
                difference = difference_of(load_exported(scratch).backbone)
                if not difference <= TOLERANCE:
                    raise UserError(
                        f"{str(run.checkpoint)!r} cannot be exported: rebuilt from its config, the "
                        f"backbone's features differ by {difference:.1e}"
                    )
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{str(target)!r} cannot be written: {reason}; choose --out") from error
    return Export(target, metadata, difference, architecture)


def _check_place(target: Path, form: Format) -> None:
    suffix, named = Path(DEFAULT_NAMES[form]).suffix, str(target)
    if suffix and target.suffix != suffix:
        raise ConfigError("--out", named, f"no file of {form}", f"let it end in {suffix}")
    if not target.parent.is_dir():
        raise ConfigError("--out", named, f"no folder {str(target.parent)!r}", "make it first")
    if target.exists():
        raise ConfigError("--out", named, "it is there already", "remove it, or choose another")


def _metadata(run: Pretrained) -> Metadata:
    backbone = run.cfg.backbone
    size, (mean, std) = fixed_view(run.cfg)
    said = {
        "solo_ext": version("solo-ext"),
        "backbone": {
            "name": backbone.name,
            "kwargs": {k: v for k, v in backbone.kwargs.items() if k not in FETCHING},
        },
        "features_dim": run.features_dim,
        "input_size": size,
        "mean": list(mean),
        "std": list(std),
        "method": run.cfg.method,
        "dataset": run.cfg.data.dataset,
        "epoch": run.epoch,
        "checkpoint_sha256": run.digest,
    }
    try:
        return validated(Metadata, said)
    except ConfigError as error:
        raise UserError(f"{str(run.checkpoint)!r} cannot be exported: {error}") from None


def _comparison(backbone: nn.Module, size: int) -> Callable[[nn.Module], float]:
    """Makes a function that gives a copy's difference of features, as in :data:`TOLERANCE`."""
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))

    def features_of(network: nn.Module) -> Tensor:
        with torch.inference_mode():
            features: Tensor = network.eval()(images)
        return features

    try:
        expected = features_of(backbone)
    except Exception as error:
        reason = textwrap.shorten(str(error), 160)
        raise UserError(f"the backbone takes no images of {size} x {size}: {reason}") from error
    if not expected.isfinite().all():
        raise UserError("the features of the backbone are not finite: its training diverged")

    def difference_of(copy: nn.Module) -> float:
        found = features_of(copy)
        if found.shape != expected.shape:
            return float("inf")
        return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))

    return difference_of


def _write_for_timm(
    folder: Path,
    backbone: nn.Module,
    metadata: Metadata,
    difference_of: Callable[[nn.Module], float],
) -> tuple[Metadata, float]:
    """Writes an export for the first of timm's candidates that has the same features."""
    name, kwargs = metadata.backbone.name, metadata.backbone.kwargs
    reason = "it has no model of that kind"
    folder.mkdir()
    for model, args in timm_candidates(name, kwargs):
        architecture = model.partition(".")[0]
        twin = Backbone(name=PREFIX + architecture, kwargs=args)
        about = metadata.model_copy(update={"backbone": twin})
        _write_weights(folder / WEIGHTS, backbone, about)
        (folder / "config.json").write_text(json.dumps(_timm_config(model, about), indent=1))
        try:
            difference = max(
                difference_of(timm.create_model(f"local-dir:{folder}", pretrained=True)),
                difference_of(load_exported(folder).backbone),
            )
        except Exception as error:
            # timm has no common type of error for unsuitable weights and arguments.
            reason = textwrap.shorten(str(error), 160) or type(error).__name__
            continue
        if difference <= TOLERANCE:
            return about, difference
        reason = f"the features of its {architecture} differ by {difference:.1e}"
    raise UserError(
        f"timm does not build backbone {name!r} with {kwargs} on {metadata.dataset}: {reason}; "
        "take --format safetensors, which solo_ext.load_exported reads"
    )


def timm_candidates(name: str, kwargs: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Models of timm, with arguments, that may have a backbone's features; most likely first.

    >>> timm_candidates("swin_tiny", {})
    [('swin_tiny_patch4_window7_224', {'num_classes': 0, 'img_size': [224, 224]})]
    """
    model = name.removeprefix(PREFIX) if name.startswith(PREFIX) else _TIMM_NAMES.get(name)
    if model is None:
        return []
    given = {k: v for k, v in kwargs.items() if k not in _ONLY_OURS}
    if name.startswith("resnet"):
        given = {_RENAMED.get(k, k): v for k, v in given.items()}
    variants = [given]
    if name.startswith("vit"):
        variants.append({**given, "num_heads": _SOLO_HEADS})
    cfg = _pretrained_cfg(model)
    # Otherwise timm would use the size of the exported images.
    size = {"img_size": list(cfg.input_size[-2:])} if cfg.fixed_input_size else {}
    return [(model, {"num_classes": 0, **size, **variant}) for variant in variants]


def torchvision_twins(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """ResNets of torchvision with a backbone's names and shapes of weights, holding its weights.

    Yields name, and the network without its classifier. Equal names and shapes do not guarantee the
    same network: compare features.

    >>> backbone = models.resnet18()
    >>> backbone.fc = nn.Identity()
    >>> next(torchvision_twins(backbone))[0]
    'resnet18'
    """
    weights = backbone.state_dict()
    shapes = {name: value.shape for name, value in weights.items()}
    for architecture in _DETECTORS_RESNETS:
        with torch.device("meta"):
            wanted = models.get_model(architecture, weights=None).state_dict()
        if shapes != {n: v.shape for n, v in wanted.items() if not n.startswith("fc.")}:
            continue
        twin = models.get_model(architecture, weights=None)
        twin.fc = nn.Identity()
        twin.load_state_dict(weights)
        yield architecture, twin.eval()


def detectron2_settings(architecture: str, mean: Sequence[float], std: Sequence[float]) -> str:
    """Settings that tell detectron2 the ResNet and its images, in its command line's format.

    ``mean`` and ``std`` are per channel, of images in [0, 1].

    >>> detectron2_settings("resnet50", [0.5] * 3, [0.25] * 3).split(" MODEL.")[3]
    'RESNETS.DEPTH 50'
    """
    # detectron2's images have values up to 255.
    shift, scale = ([round(255 * v, 3) for v in values] for values in (mean, std))
    with torch.device("meta"):
        model = models.get_model(architecture, weights=None)
    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    bottleneck = isinstance(model.layer1[0], models.resnet.Bottleneck)
    settings = {
        "DEPTH": 2 + (3 if bottleneck else 2) * sum(map(len, stages)),
        "NUM_GROUPS": model.groups,
        "WIDTH_PER_GROUP": model.base_width,
    }
    if not bottleneck:
        # detectron2's default is 256, which is right for the bottleneck ResNets only.
        settings["RES2_OUT_CHANNELS"] = 64
    listed = " ".join(f"MODEL.RESNETS.{name} {value}" for name, value in settings.items())
    return (
        f"INPUT.FORMAT RGB MODEL.PIXEL_MEAN {shift} MODEL.PIXEL_STD {scale} {listed} "
        "MODEL.RESNETS.STRIDE_IN_1X1 False"
    )


def _save_weights(backbone: nn.Module, file: Path, *, detectron2: bool) -> None:
    """Writes a file for torchvision and mmdetection, or detectron2's pickle of arrays."""
    weights = {name: value.clone() for name, value in backbone.state_dict().items()}
    if not detectron2:
        torch.save(weights, file)
        return
    arrays = {name: value.numpy() for name, value in _detectron2_names(weights).items()}
    content = {"model": arrays, "__author__": "solo_ext", "matching_heuristics": True}
    with file.open("wb") as opened:
        pickle.dump(content, opened)


def _detectron2_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, value in weights.items():
        stage, dot, rest = name.partition(".")
        place = f"{_NEXT[stage]}{dot}{rest}" if stage in _NEXT else f"stem.{name}"
        place = place.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        # detectron2's batch norm does not count batches.
        if not name.endswith("num_batches_tracked"):
            renamed[re.sub(r"\bbn(\d)\b", r"conv\1.norm", place)] = value
    return renamed


def _pretrained_cfg(model: str) -> PretrainedCfg:
    return timm.get_pretrained_cfg(model, allow_unregistered=True) or PretrainedCfg()


def _timm_config(model: str, metadata: Metadata) -> dict[str, Any]:
    size, args, cfg = metadata.input_size, metadata.backbone.kwargs, _pretrained_cfg(model)
    return {
        "architecture": model.partition(".")[0],
        "num_classes": args["num_classes"],
        "num_features": metadata.features_dim,
        "model_args": args,
        "pretrained_cfg": {
            "num_classes": args["num_classes"],
            "fixed_input_size": cfg.fixed_input_size,
            "first_conv": cfg.first_conv,
            "classifier": cfg.classifier,
            "input_size": [3, size, size],
            "interpolation": "bicubic",
            # Evaluation scales the shorter side to 8/7 of the crop, if it is longer than the crop.
            "crop_pct": 1.0 if _SIDES.get(metadata.dataset, size + 1) <= size else 0.875,
            "crop_mode": "center",
            "mean": metadata.mean,
            "std": metadata.std,
        },
    }


def _write_weights(file: Path, backbone: nn.Module, metadata: Metadata) -> None:
    # Clone: tied weights are one tensor under two keys, which safetensors refuses.
    weights = {k: v.clone() for k, v in backbone.state_dict().items()}
    save_file(weights, file, metadata={KEY: metadata.model_dump_json()})


@contextlib.contextmanager
def _placed(target: Path) -> Iterator[Path]:
    """Yields a temporary path, which becomes ``target`` if the block succeeds."""
    scratch = target.parent / f".{target.name}.saving"
    _remove(scratch)
    try:
        with writing(target):
            yield scratch
        os.replace(scratch, target)
    finally:
        _remove(scratch)


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.unlink(missing_ok=True)
