"""Which model of plain timm may be the same network as a backbone; that it is, features tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm
from timm.models import PretrainedCfg

from solo_ext.host.backbones import PREFIX

_SIZES = ("tiny", "small", "base", "large")
_TWINS = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    **{f"vit_{size}": f"vit_{size}_patch16_224" for size in _SIZES},
    **{f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in _SIZES},
    **{f"convnext_{size}": f"convnext_{size}" for size in _SIZES},
}
_RENAMED = {"groups": "cardinality", "width_per_group": "base_width"}
"""Arguments of torchvision's ResNets by timm's names."""
_ONLY_OURS = ("small_stem", "zero_init_residual")
"""Arguments that timm does not know; the features show where they matter."""
_SOLO_HEADS = 12
"""Heads of solo-learn's vision transformers of MoCo v3 and MAE up to base; no shape shows them."""


@dataclass(frozen=True)
class TimmModel:
    """A model of timm.

    Attributes:
        architecture: timm's name, without tag.
        args: arguments of ``timm.create_model``, as JSON holds them.
        pretrained_cfg: the facts that timm needs to adapt the model to other images or classes.
    """

    architecture: str
    args: dict[str, Any]
    pretrained_cfg: dict[str, Any]


def timm_twins(name: str, kwargs: Mapping[str, Any]) -> list[TimmModel]:
    """Models that may have the same state dict and features, likeliest first.

    Args:
        name: ``backbone.name``.
        kwargs: ``backbone.kwargs``, without those that fetch weights.
    """
    full_name = name.removeprefix(PREFIX) if name.startswith(PREFIX) else _TWINS.get(name)
    if full_name is None:
        return []
    given = dict(kwargs)
    if name.startswith("resnet"):
        given = {_RENAMED.get(k, k): v for k, v in given.items()}
    given = {k: v for k, v in given.items() if k not in _ONLY_OURS}
    variants = [given]
    if name.startswith("vit"):
        variants.append({**given, "num_heads": _SOLO_HEADS})
    return [_timm_model(full_name, args) for args in variants]


def _timm_model(full_name: str, given: Mapping[str, Any]) -> TimmModel:
    cfg = timm.get_pretrained_cfg(full_name, allow_unregistered=True) or PretrainedCfg()
    args: dict[str, Any] = {"num_classes": 0, **given}
    if cfg.fixed_input_size:
        # Else timm would take the size of the images that are exported for.
        args.setdefault("img_size", list(cfg.input_size[-2:]))
    kept = ("fixed_input_size", "first_conv", "classifier")
    facts = {"num_classes": args["num_classes"], **{key: getattr(cfg, key) for key in kept}}
    return TimmModel(full_name.partition(".")[0], args, facts)
