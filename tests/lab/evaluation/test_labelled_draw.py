"""Draws of few labelled rows, and the probes on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from solo_ext.lab.evaluation.labelled_draw import labelled_draw
from solo_ext.lab.evaluation.linear import few_label_probe
from solo_ext.lab.evaluation.protocols import Features
from solo_ext.lab.evaluation.protocols.lowshot import LowShot

LABELS = np.array([0] * 10 + [1] * 40 + [2] * 7 + [-1] * 5)


@pytest.mark.parametrize(
    ("amount", "counts"),
    [(1, [1, 1, 1]), (7, [7, 7, 7]), (0.1, [1, 4, 1]), (0.5, [5, 20, 4]), (0.001, [1, 1, 1])],
)
def test_every_class_is_there(amount: float, counts: list[int]) -> None:
    rows = labelled_draw(LABELS, range(3), amount, 0, 0)
    assert np.bincount(LABELS[rows]).tolist() == counts
    assert len(set(rows.tolist())) == sum(counts)


def test_draws_differ_and_repeat() -> None:
    draws = [labelled_draw(LABELS, range(3), 5, 0, d).tolist() for d in range(4)]
    assert len({tuple(d) for d in draws}) == 4
    assert labelled_draw(LABELS, range(3), 5, 0, 2).tolist() == draws[2]
    assert labelled_draw(LABELS, range(3), 5, 1, 2).tolist() != draws[2]


def test_fewer_are_among_more() -> None:
    few, many = (set(labelled_draw(LABELS, range(3), n, 0, 0).tolist()) for n in (2, 6))
    assert few < many


def test_class_with_too_few_rows() -> None:
    with pytest.raises(ValueError, match="Class 2 has 7 train rows, fewer than per_class=8"):
        labelled_draw(LABELS, range(3), 8, 0, 0)


def test_protocol_is_the_probe_with_few_labels(digits: Features) -> None:
    parts = (digits.train, digits.train_targets, digits.test, digits.test_targets)
    mean, std, accuracies = few_label_probe(*parts, per_class=3, draws=4, seed=2)
    (row,) = LowShot(shots=[3], fractions=[], draws=4, seed=2).measure(digits)
    assert (row["acc1"], row["std"]) == pytest.approx((mean, std))
    low, high = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(accuracies))
    assert row["ci95"] == pytest.approx((high - low) / 2)
    assert (row["labels"], row["images"]) == ("3 per class", 30)


def test_methods_are_compared_on_the_same_rows(
    digits: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spy(x: torch.Tensor, y: torch.Tensor, *rest: object, **options: object) -> None:
        seen.append((x[:, 0] if x.shape[1] == 1 else x.sum(1)).tolist())
        raise KeyboardInterrupt

    seen: list[list[float]] = []
    monkeypatch.setattr("solo_ext.lab.evaluation.protocols.lowshot.linear_probe", spy)
    other = replace(digits, train=digits.train.sum(1, keepdim=True))
    for features in (digits, other):
        with pytest.raises(KeyboardInterrupt):
            LowShot(shots=[], fractions=[0.1]).measure(features)
    assert seen[0] == seen[1]


def test_more_labels_are_better(digits: Features) -> None:
    rows = LowShot(shots=[1, 10], fractions=[0.5], draws=3).measure(digits)
    assert [r["labels"] for r in rows] == ["1 per class", "10 per class", "50 %"]
    assert rows[0]["acc1"] < rows[1]["acc1"] < rows[2]["acc1"]
    names = LowShot.headline(rows)
    assert list(names) == ["acc1_1_per_class", "acc1_10_per_class", "acc1_50_percent"]


def test_single_draw_has_no_deviation(digits: Features) -> None:
    (row,) = LowShot(shots=[2], fractions=[], draws=1).measure(digits)
    assert (row["std"], row["ci95"]) == (None, None)
