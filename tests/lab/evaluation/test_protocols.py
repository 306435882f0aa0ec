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
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation.protocols import PROTOCOLS, FeatureProtocol, Features, headline
from solo_ext.lab.evaluation.run_settings import EvalRun
from solo_ext.lab.evaluation.settings import read_settings

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
    rows = ON_FEATURES["lowshot"](shots=[1, 500], fractions=[], draws=2).measure(digits)  # type: ignore[call-arg]
    one, many = rows
    assert one["note"] == ""
    assert one["acc1"] > 20
    assert (many["labels"], many["acc1"], many["images"]) == ("500 per class", None, None)
    smallest = int(digits.train_targets.bincount().min())
    assert many["note"].endswith(f"has {smallest} training images")
    assert headline("lowshot", rows) == {"acc1_1_per_class": one["acc1"]}
    with pytest.raises(ConfigError, match=r"shots\.0=500: class \d has \d+ training images; lower"):
        ON_FEATURES["lowshot"](shots=[500], fractions=[]).measure(digits)  # type: ignore[call-arg]


def test_class_without_training_image_is_named(digits: Features) -> None:
    kept = digits.train_targets != 4
    without = replace(
        digits,
        train=digits.train[kept],
        train_targets=digits.train_targets[kept],
        class_names=[f"digit {c}" for c in range(10)],
    )
    with pytest.raises(UserError, match="class 'digit 4' has no training image") as caught:
        ON_FEATURES["lowshot"]().measure(without)
    assert "lower" not in str(caught.value)


def test_one_class_is_no_clustering(digits: Features) -> None:
    one = replace(
        digits,
        train_targets=torch.zeros_like(digits.train_targets),
        test_targets=torch.zeros_like(digits.test_targets),
        num_classes=1,
    )
    with pytest.raises(ConfigError, match="k=null: there is one class"):
        ON_FEATURES["clustering"]().measure(one)
    (row,) = ON_FEATURES["clustering"](k=[2]).measure(one)  # type: ignore[call-arg]
    assert row["accuracy"] < 100


def test_query_without_an_answer_is_a_line(digits: Features) -> None:
    places = torch.stack([(digits.test_targets == c).nonzero()[0, 0] for c in range(10)])
    few = replace(digits, test=digits.test[places], test_targets=digits.test_targets[places])
    with pytest.raises(ConfigError, match=r"gallery='test': no query shares its class .*=train"):
        ON_FEATURES["retrieval"]().measure(few)


def test_spread_of_one_image_is_a_line(digits: Features) -> None:
    one = replace(digits, test=digits.test[:1], test_targets=digits.test_targets[:1])
    with pytest.raises(ConfigError, match=r"split='test': it has one labelled image.*=train"):
        ON_FEATURES["geometry"]().measure(one)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ON_FEATURES)
def test_split_without_labels_is_a_line(name: str, split: str, digits: Features) -> None:
    targets = f"{split}_targets"
    bare = replace(digits, **{targets: torch.full_like(getattr(digits, targets), -1)})
    if split == "train" and name in ("clustering", "retrieval", "geometry"):
        # They are of the test split.
        assert measured(name, bare)
        return
    with pytest.raises(UserError, match=f"images of the {split} split has a label"):
        measured(name, bare)


def test_nothing_to_choose_by_takes_the_middle(digits: Features) -> None:
    """One row per class leaves none to hold out."""
    places = torch.stack([(digits.train_targets == c).nonzero()[0, 0] for c in range(10)])
    few = replace(digits, train=digits.train[places], train_targets=digits.train_targets[places])
    (row,) = ON_FEATURES["linear_sgd"]().measure(few)
    assert (row["learning_rate"], row["weight_decay"]) == (0.01, 1e-3)
    assert (row["at_edge"], row["held_out_acc1"]) == (None, None)
    (one,) = ON_FEATURES["linear_sgd"](learning_rate=[0.1], weight_decay=[0.0]).measure(digits)  # type: ignore[call-arg]
    assert one["at_edge"] is False


def test_more_clusters_than_images(digits: Features) -> None:
    with pytest.raises(ConfigError, match=r"k\.0=5000: the test split has 797 labelled images"):
        ON_FEATURES["clustering"](k=[5000]).measure(digits)  # type: ignore[call-arg]
