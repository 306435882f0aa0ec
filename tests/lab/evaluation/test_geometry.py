"""Spread and collapse of features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.geometry import FeatureSpace, _feature_geometry
from solo_ext.losses import alignment_loss_func, uniformity_loss_func
from solo_ext.losses.alignment import effective_rank


def cloud(count: int = 60, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator) + 0.5
    return x, torch.randint(4, (count,), generator=generator)


@pytest.mark.parametrize("block", [500, 2**20])
def test_equals_the_losses(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solo_ext.lab.evaluation.geometry._MAX_ELEMENTS", block)
    x, y = cloud()
    found = _feature_geometry(x, y)
    unit = F.normalize(x, dim=1)
    first, second = torch.triu_indices(60, 60, offset=1)
    same = y[first] == y[second]
    pairs = alignment_loss_func(unit[first[same]], unit[second[same]])
    assert found["uniformity"] == pytest.approx(float(uniformity_loss_func(unit)), abs=1e-5)
    assert found["class_alignment"] == pytest.approx(float(pairs), rel=1e-5)
    assert found["effective_rank"] == pytest.approx(float(effective_rank(x)), rel=1e-5)
    cosine = (unit[first] * unit[second]).sum(1).mean()
    assert found["mean_cosine"] == pytest.approx(float(cosine), abs=1e-5)
    assert found["mean_norm"] == pytest.approx(float(x.norm(dim=1).mean()), rel=1e-5)
    assert found["dead"] == 0


def test_collapsed_and_isotropic() -> None:
    x = torch.tensor([[3.0, 4.0]]).expand(10, 2)
    expected = {
        **{"effective_rank": 1, "uniformity": 0, "class_alignment": 0, "mean_cosine": 1, "std": 0},
        **{"dead": 100, "mean_norm": 5},
    }
    assert _feature_geometry(x, torch.arange(10) % 2) == pytest.approx(expected, abs=1e-3)
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    found = _feature_geometry(x, torch.zeros(4000))
    assert found["std"] == pytest.approx(1, abs=0.02)
    assert found["effective_rank"] == pytest.approx(16, abs=0.1)
    assert found["mean_cosine"] == pytest.approx(0, abs=1e-3)
    assert found["class_alignment"] == pytest.approx(2, abs=0.01)


def test_dead_dimensions() -> None:
    x, y = cloud()
    found = _feature_geometry(torch.cat([x, torch.full((60, 8), 2.0)], dim=1), y)
    assert found["dead"] == 50


def test_protocol_draws_of_many_and_has_no_nan() -> None:
    x, y = cloud()
    features = Features((x, y), (x, torch.arange(60)), [str(c) for c in range(60)])
    (row,) = FeatureSpace(samples=20).measure(features)
    assert (row["images"], row["class_alignment"]) == (20, None)
    (again,) = FeatureSpace(samples=20, seed=1).measure(features)
    assert again["uniformity"] != row["uniformity"]


def test_spread_of_one_image_is_a_line(digits: Features) -> None:
    one = replace(digits, test=(digits.test[0][:1], digits.test[1][:1]))
    with pytest.raises(ConfigError, match=r"split='test': it has one labelled image.*=train"):
        FeatureSpace().measure(one)
