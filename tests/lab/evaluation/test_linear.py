"""Linear probes: against scikit-learn and torch's SGD, and on few labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation import linear
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.linear import Linear, LowShot, _draw_labelled_rows
from solo_ext.lab.evaluation.scores import Clustering

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def probe(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, **options: Any) -> dict[str, float]:
    return Linear(**options).probe((x, y), (x_test, y_test))


def make_data(
    train: int = 120, test: int = 200, dim: int = 6, classes: int = 4, seed: int = 0
) -> Data:
    """Returns train rows, their targets, test rows and their targets, badly scaled and shifted."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=generator)
    labels = torch.arange(train + test) % classes
    rows = centres[labels] + torch.randn(train + test, dim, generator=generator)
    rows = 5.0 + rows * torch.logspace(-2, 2, dim)
    return rows[:train], labels[:train], rows[train:], labels[train:]


@pytest.mark.parametrize(("weight_decay", "classes"), [(1e-3, 2), (1e-1, 9)])
def test_equals_scikit_learn(weight_decay: float, classes: int) -> None:
    x, y, x_test, y_test = make_data(classes=classes)
    found = probe(x, y, x_test, y_test, weight_decay=[weight_decay], max_iterations=500)
    scaler = StandardScaler().fit(x.double())
    inputs = torch.from_numpy(scaler.transform(x.double()))
    # scikit-learn's binary model is a sigmoid, whose weight is the difference of the two rows.
    penalty = weight_decay / 2 if classes == 2 else weight_decay
    reference = LogisticRegression(C=1 / (len(x) * penalty), tol=1e-10, max_iter=5000)
    reference.fit(inputs, y)
    inputs_test = scaler.transform(x_test.double())
    expected = 100 * reference.score(inputs_test, y_test)
    assert found["acc1"] == pytest.approx(expected, abs=1e-9)
    if classes > 5:
        best = reference.decision_function(inputs_test).argsort(axis=1)[:, -5:]
        expected_top5 = 100 * (best == y_test.numpy()[:, None]).any(axis=1).mean()
        assert found["acc5"] == pytest.approx(expected_top5, abs=1e-9)
    assert found["train_acc1"] == pytest.approx(100 * reference.score(inputs, y), abs=1e-9)
    assert 30 < expected < 99, "the data must not be trivial"

    blank = inputs.new_zeros(classes, x.shape[1]), inputs.new_zeros(classes)
    weight, _ = linear._fit(inputs, y, blank, weight_decay, 500)
    coefficients = torch.from_numpy(reference.coef_)
    if classes == 2:
        weight = weight[1:] - weight[:1]
    torch.testing.assert_close(weight, coefficients, rtol=1e-3, atol=1e-4)


def make_strong() -> Data:
    """Returns few rows with their classes apart in every column: the class means are the best."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(560) % 2
    rows = 0.15 * (2 * labels - 1)[:, None] + torch.randn(560, 100, generator=generator)
    return rows[:160], labels[:160], rows[160:], labels[160:]


def make_weak() -> Data:
    """Returns classes that only the small difference of two large columns tells apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(560) % 2
    rows = 9 * torch.randn(560, 1, generator=generator) + torch.randn(560, 2, generator=generator)
    rows[:, 0] += 2 * (2 * labels - 1)
    return rows[:160], labels[:160], rows[160:], labels[160:]


@pytest.mark.parametrize(
    ("data", "best", "grid"),
    [(make_strong(), 10.0, [1e-4, 1e-2, 10.0]), (make_weak(), 1e-2, [10.0, 1e-2, 1e-4])],
)
def test_penalty_is_the_best_on_the_holdout(data: Data, best: float, grid: list[float]) -> None:
    x, y, x_test, y_test = data
    inputs = torch.from_numpy(StandardScaler().fit_transform(x.double()))
    held = linear.holdout_mask(y.numpy(), 0.2, 0)
    scores = {}
    for weight_decay in sorted(grid, reverse=True):
        reference = LogisticRegression(C=2 / (128 * weight_decay), tol=1e-10, max_iter=5000)
        scores[weight_decay] = reference.fit(inputs[~held], y[~held]).score(inputs[held], y[held])
    assert max(scores, key=scores.__getitem__) == best, "the data must need this penalty"
    found = probe(x, y, x_test, y_test, weight_decay=grid)
    assert found["weight_decay"] == best
    alone = probe(x, y, x_test, y_test, weight_decay=[best])
    assert found == alone, "the chosen penalty was not refitted on all rows"


def test_test_rows_do_not_choose_the_penalty() -> None:
    x, y, x_test, y_test = make_weak()
    found = probe(x, y, x_test, y_test)
    order = torch.randperm(len(y_test), generator=torch.Generator().manual_seed(0))
    shuffled = probe(x, y, x_test, y_test[order])
    other = probe(x, y, 100 * x_test[:7], y_test[:7])
    assert shuffled["acc1"] != found["acc1"]
    for key in ("weight_decay", "train_acc1"):
        assert shuffled[key] == other[key] == found[key]


@pytest.mark.parametrize(
    ("holdout", "held"), [(0.2, [2, 1, 8]), (0.01, [1, 1, 1]), (0.99, [9, 1, 39])]
)
def test_holdout_is_stratified(holdout: float, held: list[int]) -> None:
    labels = torch.tensor([0] * 10 + [1] * 2 + [2] * 40)
    masks = [linear.holdout_mask(labels.numpy(), holdout, seed) for seed in (0, 0, 1)]
    assert labels[masks[0]].bincount().tolist() == held
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize(("grid", "middle"), [([0.3, 0.1, 0.2], 0.2), ([0.4, 0.1, 0.2, 0.3], 0.3)])
def test_a_class_with_one_row_falls_back_to_the_middle(grid: list[float], middle: float) -> None:
    x, y, x_test, y_test = make_data()
    y = torch.where(torch.arange(len(y)) == 7, 4, y)
    assert probe(x, y, x_test, y_test, weight_decay=grid)["weight_decay"] == middle


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_class_missing_in_train_only_costs_its_own_rows(missing: int) -> None:
    x, y, x_test, y_test = make_data(classes=4)
    x, y, there = x[y != missing], y[y != missing], y_test != missing
    known = probe(x, y, x_test[there], y_test[there])
    found = probe(x, y, x_test, y_test)
    assert found["acc1"] == pytest.approx(0.75 * known["acc1"])
    assert found["acc5"] == pytest.approx(75.0)
    assert found["train_acc1"] == known["train_acc1"]


def test_constant_columns_and_a_large_offset_do_no_harm() -> None:
    x, y, x_test, y_test = make_data()
    x, x_test = x.double(), x_test.double()
    expected = probe(x, y, x_test, y_test, weight_decay=[0.01])
    assert probe(x + 1e6, y, x_test + 1e6, y_test, weight_decay=[0.01]) == expected
    padded = [F.pad(rows, (0, 1), value=0.1) for rows in (x, x_test)]
    found = probe(padded[0], y, padded[1], y_test, weight_decay=[0.01])
    assert found["acc1"] == expected["acc1"]
    collapsed = probe(torch.ones_like(x), y, torch.ones_like(x_test), y_test)
    assert collapsed["acc1"] == 25.0


LABELS = np.array([0] * 10 + [1] * 40 + [2] * 7)


@pytest.mark.parametrize(
    ("amount", "counts"),
    [(1, [1, 1, 1]), (7, [7, 7, 7]), (0.1, [1, 4, 1]), (0.5, [5, 20, 4]), (0.001, [1, 1, 1])],
)
def test_every_class_is_there(amount: float, counts: list[int]) -> None:
    rows = _draw_labelled_rows(LABELS, range(3), amount, 0, 0)
    assert np.bincount(LABELS[rows]).tolist() == counts
    assert len(set(rows.tolist())) == sum(counts)


def test_draws_differ_repeat_and_contain_smaller_ones() -> None:
    draws = [_draw_labelled_rows(LABELS, range(3), 5, 0, d).tolist() for d in range(4)]
    assert len({tuple(d) for d in draws}) == 4
    assert _draw_labelled_rows(LABELS, range(3), 5, 0, 2).tolist() == draws[2]
    assert _draw_labelled_rows(LABELS, range(3), 5, 1, 2).tolist() != draws[2]
    assert set(_draw_labelled_rows(LABELS, range(3), 2, 0, 2).tolist()) < set(draws[2])


def test_lowshot_is_the_probe_over_draws(digits: Features) -> None:
    (x, y), scores = digits.train, []
    for draw in range(4):
        rows = _draw_labelled_rows(y.numpy(), range(10), 3, 2, draw)
        found = Linear(weight_decay=[0.01]).probe((x[rows], y[rows]), digits.test)
        scores.append(found["acc1"])
    (row,) = LowShot(shots=[3], fractions=[], draws=4, seed=2).measure(digits)
    assert row["acc1"] == pytest.approx(np.mean(scores))
    assert row["std"] == pytest.approx(np.std(scores, ddof=1))
    low, high = stats.t.interval(0.95, 3, loc=np.mean(scores), scale=stats.sem(scores))
    assert row["ci95"] == pytest.approx((high - low) / 2)
    assert (row["labels"], row["images"]) == ("3 per class", 30)
    few, share = LowShot(shots=[1], fractions=[0.5], draws=1).measure(digits)
    assert few["acc1"] < row["acc1"] < share["acc1"]
    assert few["std"] is few["ci95"] is None
    assert list(LowShot.headline([few, share])) == ["acc1_1_per_class", "acc1_50_percent"]


def test_more_shots_than_images(digits: Features, caplog: pytest.LogCaptureFixture) -> None:
    (row,) = LowShot(shots=[1, 500], fractions=[], draws=2).measure(digits)
    assert row["labels"] == "1 per class"
    assert row["acc1"] > 20
    smallest = int(digits.train[1].bincount().min())
    assert f"has {smallest} training images, so 500 per class cannot be measured" in caplog.text
    with pytest.raises(ConfigError, match=r"shots=\[500\]: class '\d' has \d+ training images"):
        LowShot(shots=[500], fractions=[]).measure(digits)


def test_class_without_training_image_is_named(digits: Features) -> None:
    x, y = digits.train
    names = [f"digit {c}" for c in range(10)]
    without = Features((x[y != 4], y[y != 4]), digits.test, names)
    with pytest.raises(UserError, match="class 'digit 4' has no training image"):
        LowShot().measure(without)


def test_a_number_without_images_is_no_class(digits: Features) -> None:
    """The labels of a list may begin at 1."""
    few = LowShot(shots=[1], fractions=[], draws=2)
    moved = [(x, y + 1) for x, y in (digits.train, digits.test)]
    later = Features(*moved, class_names=[*map(str, range(11))])
    assert few.measure(later) == few.measure(digits)
    assert Clustering(seeds=1).measure(later) == Clustering(seeds=1).measure(digits)


def test_works_on_inference_tensors_inside_inference_mode() -> None:
    data = make_data()
    expected = probe(*data, weight_decay=[0.01])
    with torch.inference_mode():
        rows = tuple(part.double() if part.is_floating_point() else part + 0 for part in data)
        assert rows[0].is_inference()
        assert probe(*rows, weight_decay=[0.01]) == expected
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("side", ["train", "test"])
def test_features_that_are_not_finite_are_refused(side: str) -> None:
    x, y, x_test, y_test = make_data()
    (x if side == "train" else x_test)[3, 2] = math.nan
    with pytest.raises(ValueError, match=f"1 of {120 if side == 'train' else 200} rows"):
        probe(x, y, x_test, y_test)
