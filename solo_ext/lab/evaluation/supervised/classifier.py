"""A backbone with a linear classifier, and its parameters by layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from timm.models import group_parameters  # type: ignore[attr-defined]
from timm.optim import (  # type: ignore[attr-defined]
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from torch import Tensor, nn
from torchvision.models import ResNet

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.features import pooled

_RESNET = {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"}
"""torchvision's ResNets have the names of timm's, but do not say how they are grouped."""


class Classifier(nn.Module):
    """Logits ``W pool(backbone(x)) + b``, (B, C), fp32 features.

    The classifier starts at normal weights of deviation 0.01 and no bias, drawn from torch's
    generator.

    Args:
        backbone: images (B, 3, H, W) to (B, D) or (B, D, H, W).
        features_dim: D.
        num_classes: C.
    """

    def __init__(self, backbone: nn.Module, features_dim: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(features_dim, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(pooled(self.backbone(x), len(x)))
        return logits

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The number of a parameter's layer by its name, as timm asks for it."""
        return self._layers().__getitem__

    def param_groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Groups with ``weight_decay`` and ``lr_scale``, timm's.

        Of the layers 0 ... L, the classifier being L, layer l learns at
        ``layer_decay ** (L - l)`` times the rate. Vectors, and what the backbone names, are not
        decayed.

        Raises:
            ConfigError: a decay below 1 for a backbone whose layers are not known.

        Source:
            BEiT (Bao et al., 2021, arXiv 2106.08254).
        """
        named = getattr(self.backbone, "no_weight_decay", None)
        spared = [f"backbone.{n}" for n in (named() if callable(named) else ())]
        if layer_decay == 1:
            groups = param_groups_weight_decay(self, weight_decay, no_weight_decay_list=spared)
            return [g for g in groups if g["params"]]
        if self._matcher() is None:
            raise ConfigError(
                "layer_decay",
                layer_decay,
                f"the layers of a {type(self.backbone).__name__} are not known",
                "layer_decay=1 trains all of them at one rate",
            )
        groups = param_groups_layer_decay(
            self, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay
        )
        return list(groups)

    def _matcher(self) -> Any:
        own = getattr(self.backbone, "group_matcher", None)
        if callable(own):
            return own(coarse=False)
        return _RESNET if isinstance(self.backbone, ResNet) else None

    def _layers(self) -> dict[str, int]:
        # With its classifier, as timm would group a whole model.
        named = [
            *self.backbone.named_parameters(),
            *((f"head.{n}", p) for n, p in self.head.named_parameters()),
        ]
        whole: Any = SimpleNamespace(named_parameters=lambda: iter(named))
        found: dict[str, int] = group_parameters(whole, self._matcher(), reverse=True)
        return {n if n.startswith("head.") else f"backbone.{n}": i for n, i in found.items()}


def accuracies(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """``acc1`` and ``acc5`` in percent; top-C with fewer than five classes.

    Args:
        logits: (n, C).
        targets: (n,); rows with target -1 are left out.
    """
    labelled = targets >= 0
    logits, targets = logits[labelled], targets[labelled]
    # Not a number is no answer.
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    guess = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hit = (guess == targets[:, None]) & ~logits.isneginf().all(dim=1, keepdim=True)
    count = max(len(targets), 1)
    return {
        "acc1": 100.0 * int(hit[:, 0].sum()) / count,
        "acc5": 100.0 * int(hit.any(dim=1).sum()) / count,
    }
