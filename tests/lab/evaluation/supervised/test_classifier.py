"""Learning rates by layer, and accuracies."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision.models import resnet18

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.supervised.classifier import Classifier, accuracies


def scales(model: Classifier, layer_decay: float) -> dict[str, float]:
    names = {id(p): n for n, p in model.named_parameters()}
    groups = model.param_groups(0.05, layer_decay)
    return {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}


def vit() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=3, embed_dim=12, num_heads=2,
        num_classes=0,
    )  # fmt: skip


def test_transformer_layers_follow_the_formula() -> None:
    """Layer 0 embeds, blocks are 1 to depth, the classifier is depth + 1."""
    found = scales(Classifier(vit(), 12, 3), 0.5)
    assert len(found) == len(list(Classifier(vit(), 12, 3).named_parameters()))
    assert found["head.weight"] == found["head.bias"] == 1
    for block in range(3):
        own = {v for k, v in found.items() if f"blocks.{block}." in k}
        assert own == {0.5 ** (3 - block)}
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight"):
        assert found[f"backbone.{name}"] == 0.5**4


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_resnet_layers_follow_the_formula(source: str) -> None:
    """Both libraries' ResNet-18: a stem, eight blocks, the classifier."""
    own: Any = timm.create_model("resnet18", num_classes=0) if source == "timm" else resnet18()
    own.fc = nn.Identity()
    found = scales(Classifier(own, 512, 3), 0.9)
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    for place, block in enumerate(blocks, start=1):
        values = {v for k, v in found.items() if k.startswith(f"backbone.{block}.")}
        assert len(values) == 1
        assert values.pop() == pytest.approx(0.9 ** (9 - place))
    assert found["backbone.conv1.weight"] == pytest.approx(0.9**9)
    assert found["head.weight"] == 1


def test_vectors_and_what_the_backbone_names_are_not_decayed() -> None:
    model = Classifier(vit(), 12, 3)
    names = {id(p): n for n, p in model.named_parameters()}
    for layer_decay in (1.0, 0.5):
        groups = model.param_groups(0.05, layer_decay)
        decay = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
        assert len(decay) == len(names)
        for name, parameter in model.named_parameters():
            spared = parameter.ndim <= 1 or name.endswith(("pos_embed", "cls_token"))
            assert decay[name] == (0 if spared else 0.05), name


def test_unknown_layers_are_refused_unless_they_learn_alike() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 4, 3)
    with pytest.raises(ConfigError, match=r"layer_decay=0.5: the layers of a Sequential"):
        model.param_groups(0.05, 0.5)
    assert sum(len(g["params"]) for g in model.param_groups(0.05, 1.0)) == 4


def test_accuracies_by_hand() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]])
    assert accuracies(logits, torch.tensor([0, 5, 1])) == pytest.approx(
        {"acc1": 100 / 3, "acc5": 200 / 3}
    )
    # Without a label a row does not count; one that is no number is an error.
    logits = torch.tensor([[1.0, 0], [1, 0], [float("nan")] * 2])
    assert accuracies(logits, torch.tensor([0, -1, 0])) == {"acc1": 50.0, "acc5": 50.0}
