"""Features that a backbone gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from solo_ext.lab.evaluation.features import extract_features


def make_backbone(*tail: nn.Module) -> nn.Sequential:
    """Returns a small network whose eval mode differs from its train mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5), *tail)


def make_images(count: int = 10) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(count, dtype=torch.int32) % 4


def modes(backbone: nn.Module) -> list[bool]:
    return [module.training for module in backbone.modules()]


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_equals_the_eval_mode_forward_and_counts_batches(batch_size: int) -> None:
    images, targets = make_images()
    loader = DataLoader(TensorDataset(images, targets), batch_size=batch_size)
    backbone, calls = make_backbone(nn.Flatten()), list[tuple[int, int]]()
    features, labels = extract_features(backbone, loader, progress=lambda *call: calls.append(call))
    expected = backbone.eval()(images).detach()
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert (features.shape, features.dtype, labels.dtype) == ((10, 80), torch.float32, torch.int64)
    assert labels.tolist() == targets.tolist()
    assert not features.requires_grad
    assert not features.is_inference()
    assert calls == [(done + 1, len(loader)) for done in range(len(loader))]


def test_backbone_in_half_precision() -> None:
    images, targets = make_images()
    features, _ = extract_features(make_backbone().bfloat16(), [(images.bfloat16(), targets)])
    assert features.dtype == torch.float32


def test_backbone_is_left_as_it_was() -> None:
    backbone = make_backbone()
    backbone[1].eval()
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    extract_features(backbone, [make_images()])
    assert modes(backbone) == [True, True, False, True]
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("where", ["backbone", "progress"])
def test_modes_are_restored_after_an_error(where: str) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(f"broken {where}")

    backbone = make_backbone()
    backbone[0].eval()
    if where == "backbone":
        backbone.register_forward_hook(fails)
    before = modes(backbone)
    with pytest.raises(RuntimeError, match=f"broken {where}"):
        extract_features(backbone, [make_images()], progress=fails)
    assert modes(backbone) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_features_are_counted(value: float) -> None:
    images, targets = make_images()
    images[[2, 7], 1:] = value
    with pytest.raises(ValueError, match="2 of 10 rows"):
        extract_features(nn.Identity(), [(images[:5], targets[:5]), (images[5:], targets[5:])])


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (nn.Flatten(2), r"returned \(10, 3, 36\) for 10 images"),
        (nn.Flatten(0, 1), r"returned \(30, 6, 6\)"),
        (nn.Unflatten(0, (5, 2)), r"returned \(5, 2, 3, 6, 6\)"),
    ],
)
def test_rejects_outputs(backbone: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extract_features(backbone, [make_images()])
