"""The protocols on features: against scikit-learn, and as a table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from solo_ext.config.schema import OnlineProtocol
from solo_ext.errors import ConfigError
from solo_ext.evaluation.protocols import PROTOCOLS, FeatureProtocol, Features, headline
from solo_ext.evaluation.run_settings import EvalRun
from solo_ext.evaluation.settings import read_settings

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
    assert list(get_args(OnlineProtocol)) == list(ON_FEATURES)


def test_settings_are_not_named_like_shared_ones() -> None:
    for name, kind in ON_FEATURES.items():
        assert not set(kind.model_fields) & set(EvalRun.model_fields), name


@pytest.mark.parametrize("name", ON_FEATURES)
def test_rows_are_a_table_that_json_holds(name: str, digits: Features) -> None:
    rows = measured(name, digits)
    assert rows
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(list(row) == list(rows[0]) for row in rows)
    numbers = headline(name, rows)
    assert numbers
    assert all(np.isfinite(v) for v in numbers.values())
    assert PROTOCOLS[name].title


@pytest.mark.parametrize("name", ON_FEATURES)
def test_is_repeatable_and_draws_nothing_of_training(name: str, digits: Features) -> None:
    before = torch.random.get_rng_state()
    first = measured(name, digits)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(9)
    assert measured(name, digits) == first


@pytest.mark.parametrize("name", ON_FEATURES)
def test_half_precision_features(name: str, digits: Features) -> None:
    """Pixels of digits are whole numbers, which half precision holds exactly."""
    half = replace(digits, train=digits.train.half(), test=digits.test.half())
    expected, found = (headline(name, measured(name, f)) for f in (digits, half))
    assert found == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("name", ON_FEATURES)
def test_rows_without_label_do_not_count(name: str, digits: Features) -> None:
    noise = torch.full((5, digits.train.shape[1]), 7.0)
    none = torch.full((5,), -1)
    padded = replace(
        digits,
        train=torch.cat([digits.train, noise]),
        train_targets=torch.cat([digits.train_targets, none]),
        test=torch.cat([digits.test, noise]),
        test_targets=torch.cat([digits.test_targets, none]),
    )
    assert headline(name, measured(name, padded)) == headline(name, measured(name, digits))


@pytest.mark.parametrize("temperature", [0.07, 0.5])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_knn_is_that_of_scikit_learn(k: int, temperature: float, digits: Features) -> None:
    def votes(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / temperature)

    # In double precision there, so that no tie is decided by rounding here alone.
    theirs = KNeighborsClassifier(k, weights=votes, metric="cosine", algorithm="brute")
    theirs.fit(digits.train.double().numpy(), digits.train_targets.numpy())
    expected = 100 * theirs.score(digits.test.double().numpy(), digits.test_targets.numpy())
    settings = {"k": [k], "temperature": [temperature]}
    (row,) = PROTOCOLS["knn"](**settings).measure(digits)  # type: ignore[attr-defined]
    assert row["acc1"] == pytest.approx(expected, abs=1e-9)


def scikit_learn_logistic(features: Features, weight_decay: float) -> float:
    scaler = StandardScaler().fit(features.train.double().numpy())
    c = 1 / (len(features.train) * weight_decay)
    theirs = LogisticRegression(C=c, max_iter=5000, tol=1e-8)
    theirs.fit(scaler.transform(features.train.double().numpy()), features.train_targets.numpy())
    x = scaler.transform(features.test.double().numpy())
    return float(100 * theirs.score(x, features.test_targets.numpy()))


@pytest.mark.parametrize("weight_decay", [1e-3, 1e-2, 1e-1])
def test_linear_is_that_of_scikit_learn(weight_decay: float, digits: Features) -> None:
    row = ON_FEATURES["linear"](weight_decay=[weight_decay]).measure(digits)[0]  # type: ignore[call-arg]
    assert row["acc1"] == pytest.approx(scikit_learn_logistic(digits, weight_decay), abs=0.5)


def test_sweep_comes_close_to_scikit_learn(digits: Features) -> None:
    row = ON_FEATURES["linear_sgd"](epochs=60).measure(digits)[0]  # type: ignore[call-arg]
    best = max(scikit_learn_logistic(digits, w) for w in (1e-3, 1e-2))
    assert row["acc1"] == pytest.approx(best, abs=1.0)


def test_unknown_protocol_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'retrieval'"):
        read_settings("retreival", {})


def test_more_shots_than_images(digits: Features) -> None:
    with pytest.raises(ConfigError, match=r"shots\.1=500: Class 0 has \d+ train rows; lower it"):
        ON_FEATURES["lowshot"](shots=[1, 500]).measure(digits)  # type: ignore[call-arg]


def test_more_clusters_than_images(digits: Features) -> None:
    with pytest.raises(ConfigError, match=r"k\.0=5000: the test split has 797 labelled images"):
        ON_FEATURES["clustering"](k=[5000]).measure(digits)  # type: ignore[call-arg]
