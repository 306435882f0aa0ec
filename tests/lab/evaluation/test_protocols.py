"""The protocols on features: against scikit-learn, and as a table."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import pytest
import torch

from solo_ext.config.schema import OnlineProtocol
from solo_ext.lab.evaluation.evaluate import PROTOCOLS
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import FeatureProtocol, accuracies

ON_FEATURES = {n: k for n, k in PROTOCOLS.items() if issubclass(k, FeatureProtocol)}
QUICK: dict[str, dict[str, Any]] = {
    "linear": {"weight_decay": [0.1]},
    "linear_sgd": {"learning_rate": [0.03, 0.1], "weight_decay": [0.0], "epochs": 3},
    "lowshot": {"shots": [2], "fractions": [0.02], "draws": 2},
    "clustering": {"seeds": 2, "restarts": 1, "iterations": 10},
}


def measured(name: str, features: Features) -> list[dict[str, Any]]:
    return ON_FEATURES[name](**QUICK.get(name, {})).measure(features)


def test_config_knows_those_that_run_while_training() -> None:
    assert list(get_args(OnlineProtocol)) == list(PROTOCOLS)


def test_settings_are_not_named_like_shared_ones() -> None:
    for name, kind in ON_FEATURES.items():
        assert not set(kind.model_fields) & set(EvalRun.model_fields), name


@pytest.mark.parametrize("name", ON_FEATURES)
def test_rows_are_a_table_and_repeatable(name: str, digits: Features) -> None:
    """One that JSON holds; random numbers of a training are left alone."""
    before = torch.random.get_rng_state()
    rows = measured(name, digits)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(9)
    assert measured(name, digits) == rows
    assert rows
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(list(row) == list(rows[0]) for row in rows)
    numbers = PROTOCOLS[name].headline(rows)
    assert numbers
    assert all(np.isfinite(v) for v in numbers.values())
    assert PROTOCOLS[name].title


def test_accuracies_by_hand() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3, 4, 5]] * 3)
    assert accuracies(logits, torch.tensor([0, 5, 1])) == pytest.approx(
        {"acc1": 100 / 3, "acc5": 200 / 3}
    )
    # A class that is never guessed, and a row that is no number.
    logits = torch.tensor([[1.0, 0], [1, 0], [float("nan")] * 2, [float("inf"), 0]])
    assert accuracies(logits, torch.tensor([0, -1, 0, 0]))["acc1"] == 25
