"""A run of solo-learn or solo_ext as a teacher: backbone, projector and prototypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.data.transforms import statistics
from solo_ext.pretrained.files import file_digest
from solo_ext.pretrained.heads import Activation, load_head
from solo_ext.pretrained.layouts import prototype_rows
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.runs import (
    MOMENTUM,
    ONLINE,
    RunCheckpoint,
    read_config,
    read_run,
    run_backbone,
)
from solo_ext.pretrained.teacher_source import TeacherSource

_GELU = ("dino", "vibcreg")
_RELU = (
    *("all4one", "barlow_twins", "byol", "debiased", "deepclusterv2", "hard_negative", "metric"),
    *("mochi", "mocov2plus", "mocov3", "nnbyol", "nnclr", "nnclr_symmetric", "nnsiam", "pcl"),
    *("protocpc", "ressl", "simclr", "simsiam", "supcon", "swav", "vicreg", "wmse"),
)


def load_run(source: TeacherSource) -> LoadedTeacher:
    """Loads the networks of a run, in the normalisation and size of its large crops.

    The head is the projector (DINO: the layers before the prototypes) where it is made of linear
    layers, batch norm and an activation that the method is known by; prototypes are taken where
    there is one set of them. What was not taken, and why, the description says.

    Raises:
        UserError: the path is no run, or has no momentum networks where those are asked for.
        HostError: solo-learn is missing.
    """
    assert source.path is not None
    run = read_run(Path(source.path))
    momentum = source.networks == "momentum"
    with torch.random.fork_rng(devices=[]):
        backbone, features_dim = run_backbone(run, MOMENTUM if momentum else ONLINE)
    projection, notes = _projection(run, features_dim, momentum)
    first = run.cfg["augmentations"][0]
    mean, std = statistics(run.cfg["data"]["dataset"], first)
    which = "momentum networks of " if momentum else ""
    return assemble(
        backbone,
        projection,
        name=f"{run.cfg['backbone']['name']} of {which}{run.cfg.get('method')} run "
        f"{str(run.checkpoint)!r}",
        digest=file_digest(run.checkpoint),
        mean=mean,
        std=std,
        input_size=first["crop_size"],
        notes=notes,
    )


def _projection(
    run: RunCheckpoint, features_dim: int, momentum: bool
) -> tuple[Projection, list[str]]:
    """What stands behind the backbone, and why something there is not taken."""
    own = "momentum_" if momentum else ""
    prefix, head = _first_below(run.weights, f"{own}projector.", f"{own}head.mlp.")
    activation = _activation(run.cfg)
    if not head:
        return Projection(), ["the run has no projector"]
    if activation is None:
        return Projection(), [f"the activation of {run.cfg.get('method')}'s projector is not known"]
    try:
        load_head(head, features_dim, activation, prefix=prefix)
    except ValueError as error:
        return Projection(), [f"its projector cannot be rebuilt ({error})"]
    place, layer = _first_below(
        run.weights, f"{own}prototypes.", f"{own}head.last_layer.", "prototypes."
    )
    rows, key, notes = None, "", []
    try:
        rows, key = prototype_rows(layer, place, str(run.checkpoint))
    except UserError:
        if any(k.endswith("weight") for k in layer):
            notes.append("its prototypes are not one set")
    projection = Projection(
        head=head, head_prefix=prefix, activation=activation, prototypes=rows, prototypes_key=key
    )
    return projection, notes


def _activation(cfg: Mapping[str, Any]) -> Activation | None:
    """Of the head, which its weights do not tell; ``None`` where the config does not either."""
    method = cfg.get("method")
    settings = cfg.get("method_kwargs") or {}
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
    if method in _GELU:
        return "gelu"
    return "relu" if method in _RELU else None


def _first_below(weights: Mapping[str, Tensor], *prefixes: str) -> tuple[str, dict[str, Tensor]]:
    """The weights below the first prefix that has any, and the prefix."""
    for prefix in prefixes:
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        if found:
            return prefix, found
    return "", {}
