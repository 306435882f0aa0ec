"""Loads runs of either generation of solo-learn: as a backbone with its config, or as a teacher."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solo_ext import host
from solo_ext.config.check import common_config
from solo_ext.config.schema import CommonConfig
from solo_ext.core.errors import ConfigError, NoSuchRun, UserError
from solo_ext.core.files import CHECKPOINT_NAME, read_text
from solo_ext.data.transforms import STATISTICS, fixed_view
from solo_ext.host.backbones import build_backbone
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained.exported import FETCHING, export_file, load_exported
from solo_ext.pretrained.files import check_fit, file_digest, holds_values, read_checkpoint
from solo_ext.pretrained.loaded import (
    Activation,
    LoadedTeacher,
    assemble,
    load_head,
    prototype_rows,
)

ARGS = "args.json"
_BACKBONES = {
    "online": ("backbone.", "encoder."),
    "momentum": ("momentum_backbone.", "momentum_encoder."),
}
"""Prefixes of a backbone's keys, in solo-learn main and in the release."""
GELU = ("dino", "vibcreg")
RELU = (
    *("all4one", "barlow_twins", "byol", "debiased", "deepclusterv2", "hard_negative", "metric"),
    *("mochi", "mocov2plus", "mocov3", "nnbyol", "nnclr", "nnclr_symmetric", "nnsiam", "pcl"),
    *("protocpc", "ressl", "simclr", "simsiam", "supcon", "swav", "vicreg", "wmse"),
)
"""Methods by the activation of their projector, which the weights do not show."""


@dataclass(frozen=True)
class Pretrained:
    """A backbone, and the run that trained it.

    Attributes:
        backbone: on the CPU, loaded without missing or unexpected keys.
        features_dim: D of its features.
        cfg: the keys of the run's config that are read here.
        checkpoint: file of the weights.
        epoch: number of epochs trained.
        digest: first 16 hex digits of the file's SHA-256.
        weights: the state dict of the method.

    >>> cfg = CommonConfig.model_construct(method="pcl")
    >>> source = Pretrained(nn.Identity(), 512, cfg, Path("last.ckpt"), 200, "0123456789abcdef", {})
    >>> source.cfg.method, source.features_dim, source.epoch
    ('pcl', 512, 200)
    """

    backbone: nn.Module
    features_dim: int
    cfg: CommonConfig
    checkpoint: Path
    epoch: int
    digest: str
    weights: dict[str, Tensor]


def load_pretrained(path: Path, networks: Literal["online", "momentum"] = "online") -> Pretrained:
    """Loads a backbone of a run.

    Args:
        path: a run directory of ``solo-ext pretrain``, a checkpoint folder of solo-learn (main or
            1.0.2), or a ``.ckpt`` file in one of these.
        networks: which of the run's backbones.

    Raises:
        UserError: the checkpoint, ``args.json`` or solo-learn is missing, or the files are damaged
            or do not fit together.

    >>> load_pretrained(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    checkpoint, cfg, state, digest = _read(path)
    prefixes = _BACKBONES[networks]
    _, weights = _first_below(state["state_dict"], *prefixes)
    if not weights:
        raise UserError(f"{str(checkpoint)!r} holds no backbone: no key starts with {prefixes}")
    backbone, features_dim = build_backbone(
        host.load().backbones,
        cfg.backbone.name,
        # The checkpoint has the weights: download nothing and read no other file.
        {k: v for k, v in cfg.backbone.kwargs.items() if k not in FETCHING},
        method=cfg.method,
        dataset=cfg.data.dataset,
    )
    file, name = f"checkpoint {str(checkpoint)!r}", f"backbone {cfg.backbone.name!r}"
    check_fit(backbone, weights, file, name, f"is {ARGS} of another run?")
    backbone.load_state_dict(weights)
    epoch = state.get("epoch", -1) + 1
    return Pretrained(backbone, features_dim, cfg, checkpoint, epoch, digest, state["state_dict"])


def run_backbone(path: Path) -> tuple[Path, str, dict[str, Tensor], list[str]]:
    """The online backbone of a run or a checkpoint, without building it.

    Returns:
        The checkpoint, its digest, the backbone's weights, and the keys of all other weights.

    Raises:
        UserError: as :func:`load_pretrained`.

    >>> run_backbone(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    checkpoint, _, state, digest = _read(path)
    prefix, weights = _first_below(state["state_dict"], *_BACKBONES["online"])
    others = [k for k in state["state_dict"] if not (prefix and k.startswith(prefix))]
    return checkpoint, digest, weights, others


def _read(path: Path) -> tuple[Path, CommonConfig, dict[str, Any], str]:
    while True:
        checkpoint = checkpoint_in(path)
        try:
            cfg, state = _config_of(checkpoint), _state_of(checkpoint)
            return checkpoint, cfg, state, file_digest(checkpoint)
        except (UserError, FileNotFoundError):
            # Try again: a run that is training may have just replaced its checkpoint by a new one.
            if checkpoint == path or os.path.lexists(checkpoint):
                raise


def checkpoint_in(path: Path) -> Path:
    """The checkpoint of the last epoch in a run directory; a file is returned as it is.

    Raises:
        UserError: there is none.

    >>> checkpoint_in(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise NoSuchRun(path)
    # Upstream may keep older checkpoints: take that of the last epoch. Modification times do not
    # tell which one that is, because a copied folder has new ones.
    found = sorted((p for p in path.iterdir() if p.suffix == ".ckpt"), key=_progress)
    if not found:
        raise UserError(
            f"{str(path)!r} is no run directory: no .ckpt file in it; give a folder that "
            "`solo-ext pretrain` or solo-learn wrote"
        )
    return found[-1]


def _progress(checkpoint: Path) -> tuple[int, bool, int, int]:
    """Sort key of ``...-ep=<epoch>[-step=<step>].ckpt``; an epoch's end comes after its steps."""
    match = CHECKPOINT_NAME.search(checkpoint.name)
    epoch, step = (match[1], match[2]) if match else ("-1", None)
    written = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    return int(epoch), step is None, int(step or 0), written


def _config_of(checkpoint: Path) -> CommonConfig:
    file = checkpoint.parent / ARGS
    if not file.is_file():
        raise UserError(f"no {ARGS} beside {str(checkpoint)!r}; it says which backbone this is")
    try:
        args = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(args, dict) or not {"backbone", "encoder"} & args.keys():
        raise UserError(f"{str(file)!r} names no backbone; it is of no solo-learn run")
    try:
        # Upstream's own script saves interpolations. They stay unresolved: otherwise the file's
        # author could choose which environment variables of the reader get into records and pages.
        return common_config(args if "backbone" in args else _from_release(args))
    except (ConfigError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{str(file)!r}: {error}") from None


def _from_release(args: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the flat arguments of 1.0.2, as far as evaluation needs them."""
    # The release writes no paths, only that they are not serializable.
    args = {k: None if v == "<not serializable>" else v for k, v in args.items()}
    kwargs = dict(args.get("backbone_args") or {})
    if kwargs.pop("cifar", False) and "swin" in str(args["encoder"]):
        kwargs["window_size"] = 4
    transform = args.get("transform_kwargs") or {}
    first = transform[0] if isinstance(transform, list) else transform
    root = args.get("data_dir")

    def path(split: str) -> str | None:
        folder = args.get(f"{split}_dir")
        if args.get("dataset") in STATISTICS:
            return root
        return str(Path(root or ".") / folder) if folder else None

    return {
        "name": args.get("name"),
        "method": args.get("method"),
        "backbone": {"name": args["encoder"], "kwargs": kwargs},
        "data": {
            "dataset": args.get("dataset"),
            "train_path": path("train"),
            "val_path": path("val"),
            "num_workers": args.get("num_workers"),
            "no_labels": bool(args.get("no_labels", False)),
        },
        "augmentations": [{"crop_size": 224, **first}],
        "optimizer": {"batch_size": args.get("batch_size", 128)},
    }


def _state_of(checkpoint: Path) -> dict[str, Any]:
    state = read_checkpoint(checkpoint)
    if not isinstance(state.get("state_dict"), dict):
        raise UserError(f"{str(checkpoint)!r} is no Lightning checkpoint: it has no state_dict")
    # The `_extra_state` of a module may be any object.
    weights = all(
        isinstance(key, str) and (holds_values(value) or key.endswith("_extra_state"))
        for key, value in state["state_dict"].items()
    )
    if not weights or not isinstance(state.get("epoch", -1), int):
        raise UserError(f"{str(checkpoint)!r} is no Lightning checkpoint, or a damaged one")
    return state


def load_run(source: TeacherKwargs) -> LoadedTeacher:
    """Loads the networks of a run as a teacher, with the normalisation and size of its large crops.

    The head is the projector (DINO: the layers before the prototypes) if it consists of linear
    layers, batch norm and the activation known for the method; prototypes are taken if there is one
    set of them. The teacher's description says what was not taken, and why.

    Raises:
        UserError: the path is no run, or lacks the momentum networks that were asked for.

    >>> load_run(TeacherKwargs(layout="run", path="nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    with torch.random.fork_rng(devices=[]):
        run = load_pretrained(Path(str(source.path)), source.networks)
    size, (mean, std) = fixed_view(run.cfg)
    momentum = source.networks == "momentum"
    which = "momentum networks of " if momentum else ""
    return assemble(
        run.backbone,
        name=f"{run.cfg.backbone.name} of {which}{run.cfg.method} run {str(run.checkpoint)!r}",
        digest=run.digest,
        mean=mean,
        std=std,
        input_size=size,
        **_behind(run, "momentum_" if momentum else ""),
    )


def load_export(source: TeacherKwargs) -> LoadedTeacher:
    """Loads what ``solo-ext export`` wrote as a teacher, with its own normalisation and size.

    Raises:
        UserError: the path is no export.

    >>> load_export(TeacherKwargs(layout="export", path="nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: 'nowhere': no such file; give what `solo-ext export` wrote
    """
    file = export_file(str(source.path))
    with torch.random.fork_rng(devices=[]):
        found = load_exported(file)
    about = found.metadata
    return assemble(
        found.backbone,
        name=f"{about.backbone.name} of export {str(file)!r}",
        digest=file_digest(file),
        mean=about.mean,
        std=about.std,
        input_size=about.input_size,
    )


def _behind(run: Pretrained, networks: str) -> dict[str, Any]:
    """Arguments of :func:`assemble` for head and prototypes, or notes why there are none."""
    prefix, head = _first_below(run.weights, f"{networks}projector.", f"{networks}head.mlp.")
    activation = _activation(run.cfg)
    if not head:
        return {"notes": ["the run has no projector"]}
    if activation is None:
        return {"notes": [f"the activation of {run.cfg.method}'s projector is not known"]}
    try:
        load_head(head, run.features_dim, activation, prefix)
    except ValueError as error:
        return {"notes": [f"its projector cannot be rebuilt ({error})"]}
    found = {"head": head, "head_prefix": prefix, "activation": activation}
    place, layer = _first_below(
        run.weights, f"{networks}prototypes.", f"{networks}head.last_layer.", "prototypes."
    )
    try:
        rows, key = prototype_rows(layer, place, str(run.checkpoint))
    except UserError:
        several = any(k.endswith("weight") for k in layer)
        return {**found, "notes": ["its prototypes are not one set"] if several else []}
    return {**found, "prototypes": rows, "prototypes_key": key}


def _activation(cfg: CommonConfig) -> Activation | None:
    """Activation of the head by the config, since weights do not show it; ``None`` if unknown."""
    seen: set[Path] = set()
    while isinstance(teacher := dict(cfg.method_kwargs).get("teacher"), Mapping):
        # A student's head is an MLP with ReLU, or has the layers of its teacher's head.
        mlp = dict(cfg.method_kwargs).get("head") == "mlp"
        layout = "moco_v2" if mlp else teacher.get("layout", "run")
        if layout != "run":
            return "gelu" if layout == "dino" else "relu"
        try:
            file = checkpoint_in(Path(teacher["path"])).resolve()
            cfg = _config_of(file)
        except (UserError, TypeError, KeyError):
            return None
        if file in seen:
            # A config from elsewhere may name itself as its teacher.
            return None
        seen.add(file)
    if cfg.method in GELU:
        return "gelu"
    return "relu" if cfg.method in RELU else None


def _first_below(weights: Mapping[str, Tensor], *prefixes: str) -> tuple[str, dict[str, Tensor]]:
    """The first prefix that any keys have, and the weights of these keys without the prefix."""
    for prefix in prefixes:
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        if found:
            return prefix, found
    return "", {}
