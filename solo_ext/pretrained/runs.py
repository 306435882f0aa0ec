"""Runs of either host: their config and weights, their backbone, or the run as a teacher."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext import host
from solo_ext.config.check import common_config
from solo_ext.config.schema import CommonConfig
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import CHECKPOINT_NAME
from solo_ext.data.transforms import STATISTICS, statistics
from solo_ext.host.backbones import build_backbone
from solo_ext.pretrained.exported import FETCHING
from solo_ext.pretrained.files import check_fit, file_digest, holds_values, read_checkpoint
from solo_ext.pretrained.heads import Activation, load_head
from solo_ext.pretrained.layouts import prototype_rows
from solo_ext.pretrained.teachers import LoadedTeacher, TeacherSource, assemble

ARGS = "args.json"
ONLINE = ("backbone.", "encoder.")
MOMENTUM = ("momentum_backbone.", "momentum_encoder.")
"""Prefixes of a backbone's keys, in solo-learn main and in the release."""
GELU = ("dino", "vibcreg")
RELU = (
    *("all4one", "barlow_twins", "byol", "debiased", "deepclusterv2", "hard_negative", "metric"),
    *("mochi", "mocov2plus", "mocov3", "nnbyol", "nnclr", "nnclr_symmetric", "nnsiam", "pcl"),
    *("protocpc", "ressl", "simclr", "simsiam", "supcon", "swav", "vicreg", "wmse"),
)
"""Methods by the activation of their projector, which its weights do not show."""


@dataclass(frozen=True)
class Pretrained:
    """A backbone and the config that it was trained with.

    Attributes:
        backbone: on the CPU, loaded without missing or unexpected keys.
        features_dim: D of its features.
        cfg: its config, as far as it is read here.
        checkpoint: the file.
        epoch: epochs trained.
        digest: first 16 hex digits of the file's SHA-256.
    """

    backbone: nn.Module
    features_dim: int
    cfg: CommonConfig
    checkpoint: Path
    epoch: int
    digest: str


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint of a run.

    Attributes:
        checkpoint: the file.
        cfg: its config, as far as it is read here.
        weights: the state dict of the method.
        epoch: epochs trained.
    """

    checkpoint: Path
    cfg: CommonConfig
    weights: dict[str, Tensor]
    epoch: int


def load_pretrained(path: Path) -> Pretrained:
    """Loads the backbone of a run.

    Args:
        path: as :func:`read_run` takes it.

    Raises:
        UserError: there is no checkpoint or no ``args.json``, or they do not fit together.
        HostError: solo-learn is missing.
    """
    run = read_run(path)
    backbone, features_dim = run_backbone(run)
    digest = file_digest(run.checkpoint)
    return Pretrained(backbone, features_dim, run.cfg, run.checkpoint, run.epoch, digest)


def read_run(path: Path) -> RunCheckpoint:
    """Reads config and weights of a run.

    Args:
        path: a run directory of ``solo-ext pretrain``, a checkpoint folder of solo-learn (main or
            1.0.2), or a ``.ckpt`` file in one of these.

    Raises:
        UserError: there is no checkpoint or no ``args.json``, or they are damaged.
    """
    checkpoint = _checkpoint_in(path)
    cfg = _config_of(checkpoint)
    state = _state_of(checkpoint)
    return RunCheckpoint(checkpoint, cfg, state["state_dict"], state.get("epoch", -1) + 1)


def read_config(path: Path) -> CommonConfig:
    """The config of a run as from :func:`read_run`, without reading its weights.

    Raises:
        UserError: as :func:`read_run`.
    """
    return _config_of(_checkpoint_in(path))


def run_backbone(run: RunCheckpoint, prefixes: tuple[str, ...] = ONLINE) -> tuple[nn.Module, int]:
    """Builds a backbone of a run and loads its weights.

    Args:
        run: the checkpoint.
        prefixes: :data:`ONLINE` or :data:`MOMENTUM`.

    Returns:
        The backbone and the size of its features.

    Raises:
        UserError: config and weights do not fit together.
        HostError: solo-learn is missing.
    """
    cfg = run.cfg
    backbone, features_dim = build_backbone(
        host.load().backbones,
        cfg.backbone.name,
        # The checkpoint has the weights: download nothing and read no other file.
        {k: v for k, v in cfg.backbone.kwargs.items() if k not in FETCHING},
        method=cfg.method,
        dataset=cfg.data.dataset,
    )
    _, weights = _first_below(run.weights, *prefixes)
    if not weights:
        raise UserError(f"{str(run.checkpoint)!r} holds no backbone: no key starts with {prefixes}")
    check_fit(
        backbone,
        weights,
        f"checkpoint {str(run.checkpoint)!r}",
        f"backbone {cfg.backbone.name!r}",
        f"is {ARGS} of another run?",
    )
    backbone.load_state_dict(weights)
    return backbone, features_dim


def _checkpoint_in(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{str(path)!r}: no such run directory or checkpoint")
    # Upstream may keep older checkpoints: take that of the last epoch. Times of files do not tell
    # it, because a copied folder has new ones.
    found = sorted(path.glob("*.ckpt"), key=_progress)
    if not found:
        raise UserError(
            f"{str(path)!r} is no run directory: no .ckpt file in it; give a folder that "
            "`solo-ext pretrain` or solo-learn wrote"
        )
    return found[-1]


def _progress(checkpoint: Path) -> tuple[int, bool, int, int]:
    """Orders ``...-ep=<epoch>[-step=<step>].ckpt``; the end of an epoch comes after its steps."""
    match = CHECKPOINT_NAME.search(checkpoint.name)
    epoch, step = (match[1], match[2]) if match else ("-1", None)
    return int(epoch), step is None, int(step or 0), checkpoint.stat().st_mtime_ns


def _config_of(checkpoint: Path) -> CommonConfig:
    file = checkpoint.parent / ARGS
    if not file.is_file():
        raise UserError(f"no {ARGS} beside {str(checkpoint)!r}; it says which backbone this is")
    try:
        args = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not JSON: {error}") from None
    if isinstance(args, dict) and isinstance(args.get("backbone"), dict):
        # Upstream's own script leaves interpolations in. They stay unresolved: otherwise the file's
        # author could choose which environment variables of the reader get into records and pages.
        pass
    elif isinstance(args, dict) and isinstance(args.get("encoder"), str):
        args = _from_release(args)
    else:
        raise UserError(f"{str(file)!r} names no backbone; it is of no solo-learn run")
    try:
        return common_config(args)
    except ConfigError as error:
        raise UserError(f"{str(file)!r}: {error}") from None


def _from_release(args: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the flat arguments of 1.0.2, as far as evaluation needs them."""
    # The release writes no paths, only that they are not serializable.
    args = {k: None if v == "<not serializable>" else v for k, v in args.items()}
    kwargs = dict(args.get("backbone_args") or {})
    cifar = kwargs.pop("cifar", False)
    if "swin" in args["encoder"] and cifar:
        kwargs["window_size"] = 4
    transform = args.get("transform_kwargs") or {}
    first = transform[0] if isinstance(transform, list) else transform
    folder = args.get("data_dir")

    def joined(name: str) -> str | None:
        return str(Path(folder or ".") / args[name]) if args.get(name) else None

    named = args.get("dataset") in STATISTICS
    return {
        "name": args.get("name"),
        "method": args.get("method"),
        "backbone": {"name": args["encoder"], "kwargs": kwargs},
        "data": {
            "dataset": args.get("dataset"),
            "train_path": folder if named else joined("train_dir"),
            "val_path": folder if named else joined("val_dir"),
            "format": "image_folder",
            "num_workers": args.get("num_workers", 4),
            "no_labels": bool(args.get("no_labels", False)),
            "fraction": -1,
        },
        "augmentations": [
            {
                "crop_size": first.get("crop_size", 224),
                "num_crops": 2,
                "mean": first.get("mean"),
                "std": first.get("std"),
            }
        ],
        "optimizer": {"batch_size": args.get("batch_size", 128)},
    }


def _state_of(checkpoint: Path) -> dict[str, Any]:
    state = read_checkpoint(checkpoint)
    if not isinstance(state.get("state_dict"), dict):
        raise UserError(f"{str(checkpoint)!r} is no Lightning checkpoint: it has no state_dict")
    strange = [k for k, v in state["state_dict"].items() if not _is_weight(k, v)]
    if strange or not isinstance(state.get("epoch", -1), int):
        what = f"weight {strange[0]!r}" if strange else f"epoch {state['epoch']!r}"
        raise UserError(f"{str(checkpoint)!r} is no Lightning checkpoint: {what} in it is none")
    return state


def _is_weight(key: object, value: object) -> bool:
    # A module may add anything to its own state.
    return isinstance(key, str) and (holds_values(value) or key.endswith("_extra_state"))


def load_run(source: TeacherSource) -> LoadedTeacher:
    """Loads the networks of a run as a teacher, with the normalisation and size of its large crops.

    The head is the projector (DINO: the layers before the prototypes) if it consists of linear
    layers, batch norm and the activation known for the method; prototypes are taken if there is one
    set of them. The description says what was not taken, and why.

    Raises:
        UserError: the path is no run, or lacks the momentum networks that were asked for.
        HostError: solo-learn is missing.
    """
    run = read_run(Path(str(source.path)))
    momentum = source.networks == "momentum"
    with torch.random.fork_rng(devices=[]):
        backbone, features_dim = run_backbone(run, MOMENTUM if momentum else ONLINE)
    first = run.cfg.augmentations[0]
    mean, std = statistics(run.cfg.data.dataset, first)
    which = "momentum networks of " if momentum else ""
    return assemble(
        backbone,
        name=f"{run.cfg.backbone.name} of {which}{run.cfg.method} run {str(run.checkpoint)!r}",
        digest=file_digest(run.checkpoint),
        mean=mean,
        std=std,
        input_size=first.crop_size,
        **_behind(run, features_dim, "momentum_" if momentum else ""),
    )


def _behind(run: RunCheckpoint, features_dim: int, networks: str) -> dict[str, Any]:
    """Head and prototypes after the backbone, for :func:`assemble`; or notes why there are none."""
    prefix, head = _first_below(run.weights, f"{networks}projector.", f"{networks}head.mlp.")
    activation = _activation(run.cfg)
    if not head:
        return {"notes": ["the run has no projector"]}
    if activation is None:
        return {"notes": [f"the activation of {run.cfg.method}'s projector is not known"]}
    try:
        load_head(head, features_dim, activation, prefix)
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
    """Activation of the head, which its weights do not show; ``None`` if the config does not."""
    method, settings = cfg.method, dict(cfg.method_kwargs)
    teacher = settings.get("teacher")
    if isinstance(teacher, Mapping):
        # A student's head is an MLP with ReLU, or like its teacher's.
        layout = "moco_v2" if settings.get("head") == "mlp" else teacher.get("layout", "run")
        if layout != "run":
            return "gelu" if layout == "dino" else "relu"
        try:
            return _activation(read_config(Path(teacher["path"])))
        except (UserError, TypeError, KeyError):
            return None
    if method in GELU:
        return "gelu"
    return "relu" if method in RELU else None


def _first_below(weights: Mapping[str, Tensor], *prefixes: str) -> tuple[str, dict[str, Tensor]]:
    """The first prefix that any weights have, and these weights without it."""
    for prefix in prefixes:
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        if found:
            return prefix, found
    return "", {}
