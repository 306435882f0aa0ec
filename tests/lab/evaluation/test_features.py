"""Tests of the feature extraction."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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


@pytest.mark.parametrize("with_indices", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_equals_the_eval_mode_forward(batch_size: int, with_indices: bool) -> None:
    images, targets = make_images()
    parts = (torch.arange(10), images, targets) if with_indices else (images, targets)
    loader = DataLoader(TensorDataset(*parts), batch_size=batch_size)
    backbone = make_backbone(nn.Flatten())
    features, labels = extract_features(backbone, loader)
    expected = backbone.eval()(images).detach()
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert features.shape == (10, 80)
    assert features.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == targets.tolist()
    assert not features.requires_grad
    assert not features.is_inference()


def test_feature_maps_are_averaged_over_positions() -> None:
    images, targets = make_images()
    features, _ = extract_features(nn.Identity(), [(images, targets)])
    torch.testing.assert_close(features, images.mean(dim=(2, 3)))


def test_half_precision_features_become_float32() -> None:
    images, targets = make_images()
    features, _ = extract_features(make_backbone().bfloat16(), [(images.bfloat16(), targets)])
    assert features.dtype == torch.float32


def test_backbone_is_left_as_it_was() -> None:
    backbone = make_backbone()
    backbone[1].eval()
    before = modes(backbone)
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    extract_features(backbone, [make_images()])
    assert modes(backbone) == before == [True, True, False, True]
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("where", ["backbone", "loader", "progress"])
def test_modes_are_restored_after_an_error(where: str) -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("broken backbone")

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        yield make_images()
        raise RuntimeError("broken loader")

    def progress(done: int, total: int) -> None:
        raise RuntimeError("broken progress")

    backbone = make_backbone(*([Broken()] if where == "backbone" else []))
    backbone[0].eval()
    before = modes(backbone)
    with pytest.raises(RuntimeError, match=f"broken {where}"):
        extract_features(
            backbone,
            loader() if where == "loader" else [make_images()],
            progress=progress if where == "progress" else None,
        )
    assert modes(backbone) == before
    assert torch.is_grad_enabled()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*make_images(), strict=True))


def test_memory_is_taken_once_for_all_rows() -> None:
    """And grows where the loader does not say how many come."""
    loader = DataLoader(TensorDataset(*make_images()), batch_size=3)
    features, _ = extract_features(nn.Identity(), loader)
    assert features.untyped_storage().nbytes() == features.nbytes
    unknown, targets = extract_features(nn.Identity(), list(loader))
    assert torch.equal(unknown, features)
    assert torch.equal(targets, make_images()[1].long())


def test_half_precision_on_request() -> None:
    features, _ = extract_features(nn.Identity(), [make_images()], dtype=torch.bfloat16)
    assert features.dtype == torch.bfloat16
    huge = (torch.full((2, 3, 1, 1), 1e6), torch.zeros(2))
    with pytest.raises(ValueError, match="2 of 2 rows of features are not finite"):
        extract_features(nn.Identity(), [huge], dtype=torch.float16)


@pytest.mark.parametrize("sized", [True, False])
def test_progress_counts_batches(sized: bool) -> None:
    calls: list[tuple[int, int]] = []
    dataset = TensorDataset(*make_images()) if sized else Stream()
    loader = DataLoader(dataset, batch_size=4)
    extract_features(nn.Identity(), loader, progress=lambda *call: calls.append(call))
    assert calls == [(done, 3 if sized else 0) for done in (1, 2, 3)]


def test_integer_targets_may_be_a_list() -> None:
    images, _ = make_images(3)
    assert extract_features(nn.Identity(), [(images, [2, -1, 0])])[1].tolist() == [2, -1, 0]


@pytest.mark.parametrize("loader", [[], [make_images(0)]])
def test_empty_loader(loader: list[tuple[Tensor, Tensor]]) -> None:
    with pytest.raises(ValueError, match="no images"):
        extract_features(nn.Identity(), loader)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_features_are_counted(value: float) -> None:
    images, targets = make_images()
    images[[2, 7], 1:] = value
    with pytest.raises(ValueError, match="2 of 10 rows"):
        extract_features(nn.Identity(), [(images[:5], targets[:5]), (images[5:], targets[5:])])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(4, 3, 6, 6), "A batch is Tensor"),
        ((torch.ones(4, 3, 6, 6),), "A batch is 1 parts"),
        (([torch.ones(4, 3, 6, 6)] * 2, torch.arange(4)), "images list"),
        ((torch.ones(4, 3, 6, 6), torch.ones(4, 9)), r"targets \(4, 9\)"),
    ],
)
def test_rejects_batches(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extract_features(nn.Identity(), [batch])


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
