"""Runs, and checkpoints as MoCo v2, SwAV and DINO were published, with random weights."""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from solo_ext.host import Host
from solo_ext.host.backbones import build_backbone

OFFICIAL = ("moco_v2", "swav", "dino_resnet50", "dino_deitsmall16")
TINY_VIT = {"depth": 1, "embed_dim": 16, "num_heads": 2}
TINY_RESNET = {"channels": [8, 8, 8, 8]}


@dataclass
class Official:
    """A checkpoint and what it was made of.

    Attributes:
        name: one of ``OFFICIAL``.
        content: as it is saved.
        weights: the state dict in it that counts.
        inner: prefix of the backbone's keys there.
        head: of the head's and prototypes' keys.
        network: the backbone.
        embed: the head, as formulas.
        rows: the prototypes as written; ``None`` for MoCo v2.
        source: arguments of ``TeacherSource`` besides the path.
    """

    name: str
    content: dict[str, Any]
    weights: dict[str, Tensor]
    inner: str
    head: list[str]
    network: nn.Module
    embed: Callable[[Tensor], Tensor]
    rows: Tensor | None
    source: dict[str, Any]

    def edited(self, edit: Callable[[dict[str, Tensor]], Any]) -> dict[str, Any]:
        """The content with an edit made to a copy of ``weights``; tensors are shared."""
        weights = dict(self.weights)
        edit(weights)
        if self.content is self.weights:
            return weights
        key = "teacher" if "teacher" in self.content else "state_dict"
        return {**self.content, key: weights}


@pytest.fixture(scope="session")
def official() -> Callable[..., Official]:
    """``official(name, tiny=False)``: the published sizes, or a few features; made once each."""
    made: dict[tuple[str, bool], Official] = {}

    def get(name: str, tiny: bool = False) -> Official:
        if (name, tiny) not in made:
            with torch.random.fork_rng():
                torch.manual_seed(OFFICIAL.index(name))
                made[name, tiny] = _MAKERS[name](tiny)
        return made[name, tiny]

    return get


def backbone(vit: bool, tiny: bool) -> nn.Module:
    """A network whose running statistics are not those it starts with."""
    network: nn.Module
    if vit:
        kwargs = TINY_VIT if tiny else {}
        network = timm.create_model("vit_small_patch16_224", num_classes=0, **kwargs)
    elif tiny:
        network = timm.create_model("resnet10t", num_classes=0, **copy.deepcopy(TINY_RESNET))
    else:
        return resnet50()
    return shaken(network)


@functools.cache
def resnet50() -> nn.Module:
    """Made once, for three of the files."""
    network = torchvision.models.resnet50()
    network.fc = nn.Identity()
    return shaken(network)


def shaken(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return network.eval()


def linear(out: int, into: int) -> tuple[Tensor, Tensor]:
    return torch.randn(out, into) / into**0.5, torch.randn(out)


def moco_v2(tiny: bool) -> Official:
    network = backbone(False, tiny)
    features, out = (8, 4) if tiny else (2048, 128)
    (w0, b0), (w2, b2) = linear(features, features), linear(out, features)
    head = {"fc.0.weight": w0, "fc.0.bias": b0, "fc.2.weight": w2, "fc.2.bias": b2}
    inner = "module.encoder_q."
    weights = {inner + k: v for k, v in {**network.state_dict(), **head}.items()}
    return Official(
        "moco_v2",
        {"epoch": 800, "arch": "resnet50", "state_dict": weights},
        weights,
        inner,
        [inner + k for k in head],
        network,
        lambda x: F.linear(F.relu(F.linear(x, w0, b0)), w2, b2),
        None,
        {"layout": "moco_v2", **_architecture(False, tiny)},
    )


def swav(tiny: bool) -> Official:
    network = backbone(False, tiny)
    features, hidden, out, k = (8, 10, 4, 12) if tiny else (2048, 2048, 128, 3000)
    (w0, b0), (w3, b3) = linear(hidden, features), linear(out, hidden)
    norm = shaken(nn.BatchNorm1d(hidden))
    rows = torch.randn(k, out)
    head = {
        "projection_head.0.weight": w0,
        "projection_head.0.bias": b0,
        **{f"projection_head.1.{key}": v for key, v in norm.state_dict().items()},
        "projection_head.3.weight": w3,
        "projection_head.3.bias": b3,
        "prototypes.weight": rows,
    }
    weights = {f"module.{key}": v for key, v in {**network.state_dict(), **head}.items()}
    return Official(
        "swav",
        weights,
        weights,
        "module.",
        [f"module.{key}" for key in head],
        network,
        lambda x: F.linear(F.relu(norm(F.linear(x, w0, b0))), w3, b3),
        rows,
        {"layout": "swav", **_architecture(False, tiny)},
    )


def dino_resnet50(tiny: bool) -> Official:
    network = backbone(False, tiny)
    features, hidden, out, k = (8, 10, 4, 12) if tiny else (2048, 4096, 256, 60000)
    (w0, b0), (w3, b3) = linear(hidden, features), linear(out, hidden)
    norm = shaken(nn.BatchNorm1d(hidden))
    rows = torch.randn(k, out)
    head = {
        "mlp.0.weight": w0,
        "mlp.0.bias": b0,
        **{f"mlp.1.{key}": v for key, v in norm.state_dict().items()},
        "mlp.3.weight": w3,
        "mlp.3.bias": b3,
        "last_layer.weight": rows,
    }
    return _dino(
        "dino_resnet50",
        network,
        head,
        lambda x: F.linear(F.gelu(norm(F.linear(x, w0, b0))), w3, b3),
        rows,
        tiny,
    )


def dino_deitsmall16(tiny: bool) -> Official:
    network = backbone(True, tiny)
    features, hidden, out, k = (16, 10, 4, 12) if tiny else (384, 2048, 256, 65536)
    (w0, b0), (w2, b2), (w4, b4) = (
        linear(hidden, features),
        linear(hidden, hidden),
        linear(out, hidden),
    )
    rows = torch.randn(k, out)
    head = {
        "mlp.0.weight": w0,
        "mlp.0.bias": b0,
        "mlp.2.weight": w2,
        "mlp.2.bias": b2,
        "mlp.4.weight": w4,
        "mlp.4.bias": b4,
        "last_layer.weight_g": torch.rand(k, 1) + 0.5,
        "last_layer.weight_v": rows,
    }

    def embed(x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(F.gelu(F.linear(x, w0, b0)), w2, b2))
        return F.linear(hidden, w4, b4)

    return _dino("dino_deitsmall16", network, head, embed, rows, tiny)


def _dino(
    name: str,
    network: nn.Module,
    head: dict[str, Tensor],
    embed: Callable[[Tensor], Tensor],
    rows: Tensor,
    tiny: bool,
) -> Official:
    vit = name == "dino_deitsmall16"
    teacher = {f"backbone.{k}": v for k, v in network.state_dict().items()}
    teacher |= {f"head.{k}": v for k, v in head.items()}
    content = {
        "student": {f"module.{k}": v for k, v in teacher.items()},
        "teacher": teacher,
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
        "epoch": 800,
        "args": argparse.Namespace(
            arch="vit_small" if vit else "resnet50",
            patch_size=16,
            out_dim=len(rows),
            norm_last_layer=False,
            local_crops_scale=(0.05, 0.14),
            data_path="/imagenet/train",
        ),
        "dino_loss": {"center": torch.zeros(1, len(rows))},
        "fp16_scaler": {"scale": 65536.0},
    }
    return Official(
        name,
        content,
        teacher,
        "backbone.",
        [f"head.{k}" for k in head],
        network,
        embed,
        rows,
        {"layout": "dino", **_architecture(vit, tiny)},
    )


def _architecture(vit: bool, tiny: bool) -> dict[str, Any]:
    if not tiny:
        return {}
    if vit:
        return {"model_kwargs": TINY_VIT}
    return {"model": "timm/resnet10t", "model_kwargs": TINY_RESNET}


_MAKERS = {
    "moco_v2": moco_v2,
    "swav": swav,
    "dino_resnet50": dino_resnet50,
    "dino_deitsmall16": dino_deitsmall16,
}


@pytest.fixture
def make_run(loaded: Host, tmp_path: Path) -> Callable[..., Path]:
    """``make(name, kwargs, ...)``: a run directory with this backbone, its weights random."""

    def make(
        name: str = "timm/resnet10t",
        kwargs: dict[str, Any] = TINY_RESNET,
        *,
        dataset: str = "custom",
        method: str | None = "simclr",
        size: int = 32,
        **augmentation: Any,
    ) -> Path:
        backbone, _ = build_backbone(loaded.backbones, name, kwargs, method=method, dataset=dataset)
        generator = torch.Generator().manual_seed(3)
        for value in backbone.state_dict().values():
            # As after training: no statistic is at its start, no branch at zero.
            if value.ndim == 1:
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        weights = {f"backbone.{k}": v for k, v in backbone.state_dict().items()}
        run = tmp_path / "run"
        run.mkdir()
        torch.save({"epoch": 6, "state_dict": weights}, run / "name-ep=6.ckpt")
        args = {
            "method": method,
            "backbone": {"name": name, "kwargs": kwargs},
            "data": {"dataset": dataset},
            "augmentations": [{"crop_size": size, **augmentation}, {"crop_size": 8}],
            "optimizer": {"batch_size": 4},
        }
        (run / "args.json").write_text(json.dumps(args))
        return run

    return make
