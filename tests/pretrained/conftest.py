"""Runs, and checkpoints as MoCo v2, SwAV and DINO were published, with random weights."""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.host import Host
from solo_ext.host.backbones import build_backbone

OFFICIAL = ("moco_v2", "swav", "dino_resnet50", "dino_deitsmall16")
TINY_VIT = {"depth": 1, "embed_dim": 16, "num_heads": 2}
TINY_RESNET = {"channels": [8, 8, 8, 8]}
MakeRun = Callable[..., Path]


def features(backbone: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = backbone.eval()(images)
    return found


def refusal(act: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line with which ``act(*args, **kwargs)`` is refused."""
    with pytest.raises(UserError) as caught:
        act(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@dataclass
class Official:
    """A checkpoint and what it was made of: backbone, head and prototypes.

    ``weights`` is the state dict in ``content`` that counts, ``inner`` the prefix of the backbone's
    keys there, ``head`` the other keys, ``source`` arguments of ``TeacherKwargs``.
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
    """``official(name, tiny=False)``: the published sizes, or a few features; made once each.

    Of DINO's 60,000 and 65,536 prototypes there is one in a hundred.
    """
    made: dict[tuple[str, bool], Official] = {}

    def get(name: str, tiny: bool = False) -> Official:
        if (name, tiny) not in made:
            with torch.random.fork_rng():
                torch.manual_seed(OFFICIAL.index(name))
                made[name, tiny] = _MAKERS[name](tiny)
        return made[name, tiny]

    return get


@pytest.fixture(scope="session")
def published(
    official: Callable[..., Official], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``published(name)``: the file of the published sizes, some 100 MB, which is written once."""
    folder = tmp_path_factory.mktemp("published")

    def write(name: str) -> Path:
        path = folder / f"{name}.pth"
        if not path.exists():
            torch.save(official(name).content, path)
        return path

    return write


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


def mlp(*widths: int, activation: type[nn.Module], norm: bool) -> nn.Sequential:
    """A head with batch norm behind its hidden layers, or without."""
    parts: list[nn.Module] = []
    for number, (width, following) in enumerate(pairwise(widths), start=1):
        parts.append(nn.Linear(width, following))
        if number < len(widths) - 1:
            parts += [*([nn.BatchNorm1d(following)] if norm else []), activation()]
    return shaken(nn.Sequential(*parts))  # type: ignore[return-value]


def moco_v2(tiny: bool) -> Official:
    network = backbone(False, tiny)
    head = mlp(*((8, 8, 4) if tiny else (2048, 2048, 128)), activation=nn.ReLU, norm=False)
    inner = "module.encoder_q."
    held = {f"{inner}fc.{k}": v for k, v in head.state_dict().items()}
    weights = {inner + k: v for k, v in network.state_dict().items()} | held
    content = {"epoch": 800, "arch": "resnet50", "state_dict": weights}
    source = {"layout": "moco_v2", **_architecture(False, tiny)}
    return Official("moco_v2", content, weights, inner, [*held], network, head, None, source)


def swav(tiny: bool) -> Official:
    network = backbone(False, tiny)
    head = mlp(*((8, 10, 4) if tiny else (2048, 2048, 128)), activation=nn.ReLU, norm=True)
    rows = torch.randn(*((12, 4) if tiny else (3000, 128)))
    held = {f"module.projection_head.{k}": v for k, v in head.state_dict().items()}
    held["module.prototypes.weight"] = rows
    weights = {f"module.{k}": v for k, v in network.state_dict().items()} | held
    source = {"layout": "swav", **_architecture(False, tiny)}
    return Official("swav", weights, weights, "module.", [*held], network, head, rows, source)


def dino_resnet50(tiny: bool) -> Official:
    head = mlp(*((8, 10, 4) if tiny else (2048, 4096, 256)), activation=nn.GELU, norm=True)
    rows = torch.randn(*((12, 4) if tiny else (600, 256)))
    layer = {"last_layer.weight": rows}
    return _dino("dino_resnet50", backbone(False, tiny), head, layer, rows, tiny)


def dino_deitsmall16(tiny: bool) -> Official:
    widths = (16, 10, 10, 4) if tiny else (384, 2048, 2048, 256)
    head = mlp(*widths, activation=nn.GELU, norm=False)
    rows = torch.randn(*((12, 4) if tiny else (655, 256)))
    layer = {"last_layer.weight_g": torch.rand(len(rows), 1) + 0.5, "last_layer.weight_v": rows}
    return _dino("dino_deitsmall16", backbone(True, tiny), head, layer, rows, tiny)


def _dino(
    name: str,
    network: nn.Module,
    head: nn.Module,
    layer: dict[str, Tensor],
    rows: Tensor,
    tiny: bool,
) -> Official:
    vit = name == "dino_deitsmall16"
    held = {f"head.mlp.{k}": v for k, v in head.state_dict().items()}
    held |= {f"head.{k}": v for k, v in layer.items()}
    teacher = {f"backbone.{k}": v for k, v in network.state_dict().items()} | held
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
    source = {"layout": "dino", **_architecture(vit, tiny)}
    return Official(name, content, teacher, "backbone.", [*held], network, head, rows, source)


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
def make_run(loaded: Host, tmp_path: Path) -> MakeRun:
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
