"""Many linear probes in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.lab.evaluation.linear_sgd import (
    SweepResult,
    _Data,
    _statistics,
    _trained,
    sweep_linear_probes,
)
from solo_ext.lab.evaluation.protocols import Features


def sweep(features: Features, **options: Any) -> SweepResult:
    parts = (features.train, features.train_targets, features.test, features.test_targets)
    options.setdefault("epochs", 3)
    return sweep_linear_probes(*parts, **options)


def data_of(features: Features) -> tuple[_Data, Tensor]:
    rows = torch.arange(len(features.train))
    return _Data(features.train, features.train_targets, *_statistics(features.train, rows)), rows


def test_all_at_once_is_each_by_itself(digits: Features) -> None:
    """And each is torch's own SGD on torch's own linear layer."""
    data, rows = data_of(digits)
    grid = [(0.01, 0.0), (0.1, 0.01), (0.3, 0.1)]
    weight, bias = _trained(data, rows, 10, grid, 2, 300, seed=0)
    for place, (rate, decay) in enumerate(grid):
        layer = nn.Linear(64, 10)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        groups = [
            {"params": [layer.weight], "weight_decay": decay},
            {"params": [layer.bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        rng = np.random.default_rng(0)
        for _ in range(2):
            order = torch.from_numpy(rng.permutation(1000))
            for part in torch.split(order, 300):
                x, y = data.rows(part)
                optimizer.zero_grad()
                F.cross_entropy(layer(x), y).backward()
                optimizer.step()
                schedule.step()
        torch.testing.assert_close(weight[:, place].T, layer.weight.detach(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(bias[place], layer.bias.detach(), rtol=1e-3, atol=1e-5)


def test_chooses_by_training_rows_alone(digits: Features) -> None:
    grid = {"learning_rates": [1e-5, 0.3, 1e-4], "weight_decays": [0.0, 0.01]}
    found = sweep(digits, **grid)
    assert found.learning_rate == 0.3
    assert len(found.held_out) == 6
    assert found.held_out[0.3, found.weight_decay] == max(found.held_out.values())
    shuffled = Features(
        digits.train, digits.train_targets, digits.test, (digits.test_targets + 1) % 10
    )
    other = sweep(shuffled, **grid)
    assert (other.learning_rate, other.held_out) == (found.learning_rate, found.held_out)
    assert other.accuracy < 20 < 80 < found.accuracy <= found.top5


def test_smaller_rate_and_larger_penalty_on_a_tie() -> None:
    x = torch.tensor([[1.0], [-1.0]]).repeat(20, 1)
    y = torch.tensor([0, 1]).repeat(20)
    found = sweep(
        Features(x, y, x, y), learning_rates=[0.5, 0.1], weight_decays=[0.0, 1e-3], holdout=0.3
    )
    assert (found.accuracy, found.learning_rate, found.weight_decay) == (100, 0.1, 1e-3)


def test_single_setting_needs_no_choice(digits: Features) -> None:
    found = sweep(digits, learning_rates=[0.3])
    assert found.held_out == {}
    assert found.accuracy > 80


def test_classes_are_what_training_has(digits: Features) -> None:
    """Numbers may have gaps; a class of the test rows alone is never right."""
    spread = Features(digits.train, digits.train_targets * 7, digits.test, digits.test_targets * 7)
    assert sweep(spread, learning_rates=[0.03]) == sweep(digits, learning_rates=[0.03])
    fewer = digits.train_targets != 3
    partial = Features(
        digits.train[fewer], digits.train_targets[fewer], digits.test, digits.test_targets
    )
    share = 100 * float((digits.test_targets != 3).float().mean())
    assert sweep(partial, learning_rates=[0.03]).top5 <= share


def test_dimension_that_never_moves(digits: Features) -> None:
    padded = Features(
        F.pad(digits.train, (0, 2), value=3.0),
        digits.train_targets,
        F.pad(digits.test, (0, 2), value=3.0),
        digits.test_targets,
    )
    assert sweep(padded, learning_rates=[0.03]) == sweep(digits, learning_rates=[0.03])


@pytest.mark.parametrize("side", ["train", "test"])
def test_needs_labels(side: str, digits: Features) -> None:
    none = torch.full_like(getattr(digits, f"{side}_targets"), -1)
    parts = {**vars(digits), f"{side}_targets": none}
    with pytest.raises(ValueError, match=f"{side}_targets have .* none of them labelled"):
        sweep(Features(**parts), learning_rates=[0.1])


def test_needs_features_of_one_backbone(digits: Features) -> None:
    parts = {**vars(digits), "test": digits.test[:, 1:]}
    with pytest.raises(ValueError, match="must be"):
        sweep(Features(**parts), learning_rates=[0.1])
