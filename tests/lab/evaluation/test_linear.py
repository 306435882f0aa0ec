"""Tests of the linear probes against scikit-learn."""

import math
import statistics
from collections import Counter

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from solo_ext.lab.evaluation import linear
from solo_ext.lab.evaluation.linear import LinearProbeResult, few_label_probe, linear_probe

Data = tuple[Tensor, Tensor, Tensor, Tensor]


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


@pytest.mark.parametrize("weight_decay", [1e-3, 1e-1])
@pytest.mark.parametrize("classes", [2, 4, 9])
def test_equals_scikit_learn(weight_decay: float, classes: int) -> None:
    x, y, x_test, y_test = make_data(classes=classes)
    found = linear_probe(x, y, x_test, y_test, weight_decays=[weight_decay], max_iterations=500)
    scaler = StandardScaler().fit(x.double())
    inputs = torch.from_numpy(scaler.transform(x.double()))
    # scikit-learn's binary model is a sigmoid, whose weight is the difference of the two rows.
    penalty = weight_decay / 2 if classes == 2 else weight_decay
    reference = LogisticRegression(C=1 / (len(x) * penalty), tol=1e-10, max_iter=5000)
    reference.fit(inputs, y)
    inputs_test = scaler.transform(x_test.double())
    expected = 100 * reference.score(inputs_test, y_test)
    assert found.accuracy == pytest.approx(expected, abs=1e-9)
    if classes > 5:
        best = reference.decision_function(inputs_test).argsort(axis=1)[:, -5:]
        expected_top5 = 100 * (best == y_test.numpy()[:, None]).any(axis=1).mean()
        assert found.top5 == pytest.approx(expected_top5, abs=1e-9)
    assert found.train_accuracy == pytest.approx(100 * reference.score(inputs, y), abs=1e-9)
    assert 30 < expected < 99, "the data must not be trivial"

    blank = linear._Model(inputs.new_zeros(classes, x.shape[1]), inputs.new_zeros(classes))
    weight = linear._fit(inputs, y, blank, weight_decay, 500).weight
    coefficients = torch.from_numpy(reference.coef_)
    if classes == 2:
        weight = weight[1:] - weight[:1]
    torch.testing.assert_close(weight, coefficients, rtol=1e-3, atol=1e-4)


def test_reports_what_it_used() -> None:
    x, y, x_test, y_test = make_data(classes=8, train=160)
    found = linear_probe(x, y, x_test, y_test, weight_decays=[0.01])
    assert isinstance(found, LinearProbeResult)
    assert found.num_train == 160
    assert found.weight_decay == 0.01
    assert found.accuracy < found.top5 < 100
    with pytest.raises(AttributeError):
        found.accuracy = 0.0  # type: ignore[misc]


def test_top5_is_clipped_to_the_classes() -> None:
    assert linear_probe(*make_data(classes=4)).top5 == 100.0


@pytest.mark.parametrize("seed", [0, 3])
def test_same_numbers_every_call(seed: int) -> None:
    data = make_data()
    torch.manual_seed(1)
    first = linear_probe(*data, seed=seed)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert linear_probe(*data, seed=seed) == first
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"


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


@pytest.mark.parametrize(("data", "best"), [(make_strong(), 10.0), (make_weak(), 1e-2)])
@pytest.mark.parametrize("grid", [(1e-4, 1e-2, 10.0), (10.0, 1e-2, 1e-4)])
def test_penalty_is_the_best_on_the_holdout(
    data: Data, best: float, grid: tuple[float, ...]
) -> None:
    x, y, x_test, y_test = data
    inputs = torch.from_numpy(StandardScaler().fit_transform(x.double()))
    held = linear.holdout_mask(y.numpy(), 0.2, 0)
    scores = {}
    for weight_decay in sorted(grid, reverse=True):
        reference = LogisticRegression(C=2 / (128 * weight_decay), tol=1e-10, max_iter=5000)
        scores[weight_decay] = reference.fit(inputs[~held], y[~held]).score(inputs[held], y[held])
    assert max(scores, key=scores.__getitem__) == best, "the data must need this penalty"
    found = linear_probe(x, y, x_test, y_test, weight_decays=grid)
    assert found.weight_decay == best
    alone = linear_probe(x, y, x_test, y_test, weight_decays=[best])
    assert found == alone, "the chosen penalty was not refitted on all rows"


@pytest.mark.parametrize("data", [make_data(), make_weak(), make_strong()])
def test_test_rows_do_not_choose_the_penalty(data: Data) -> None:
    x, y, x_test, y_test = data
    found = linear_probe(x, y, x_test, y_test)
    order = torch.randperm(len(y_test), generator=torch.Generator().manual_seed(0))
    shuffled = linear_probe(x, y, x_test, y_test[order])
    other = linear_probe(x, y, 100 * x_test[:7], y_test[:7])
    assert shuffled.accuracy != found.accuracy
    assert shuffled.weight_decay == other.weight_decay == found.weight_decay
    assert shuffled.train_accuracy == other.train_accuracy == found.train_accuracy


@pytest.mark.parametrize(
    ("holdout", "held"), [(0.2, [2, 1, 8]), (0.01, [1, 1, 1]), (0.99, [9, 1, 39])]
)
def test_holdout_is_stratified(holdout: float, held: list[int]) -> None:
    labels = torch.tensor([0] * 10 + [1] * 2 + [2] * 40)
    masks = [linear.holdout_mask(labels.numpy(), holdout, seed) for seed in (0, 0, 1)]
    assert labels[masks[0]].bincount().tolist() == held
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize(("grid", "middle"), [((0.3, 0.1, 0.2), 0.2), ((0.4, 0.1, 0.2, 0.3), 0.3)])
def test_a_class_with_one_row_falls_back_to_the_middle(
    grid: tuple[float, ...], middle: float
) -> None:
    x, y, x_test, y_test = make_data()
    y = torch.where(torch.arange(len(y)) == 7, 4, y)
    assert linear_probe(x, y, x_test, y_test, weight_decays=grid).weight_decay == middle


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_class_missing_in_train_only_costs_its_own_rows(missing: int) -> None:
    x, y, x_test, y_test = make_data(classes=4)
    x, y, there = x[y != missing], y[y != missing], y_test != missing
    known = linear_probe(x, y, x_test[there], y_test[there])
    found = linear_probe(x, y, x_test, y_test)
    assert found.accuracy == pytest.approx(0.75 * known.accuracy)
    assert found.top5 == pytest.approx(75.0)
    assert found.train_accuracy == known.train_accuracy


def test_a_class_missing_in_test() -> None:
    x, y, x_test, y_test = make_data(classes=4)
    everything = linear_probe(x, y, x_test, y_test)
    found = linear_probe(x, y, x_test[y_test < 3], y_test[y_test < 3], num_classes=4)
    last = linear_probe(x, y, x_test[y_test == 3], y_test[y_test == 3])
    assert (3 * found.accuracy + last.accuracy) / 4 == pytest.approx(everything.accuracy)


def test_unlabelled_rows_are_dropped() -> None:
    x, y, x_test, y_test = make_data()
    none = torch.full((9,), -1)
    found = linear_probe(
        torch.cat((1e3 * x_test[:9], x)),
        torch.cat((none, y)),
        torch.cat((x_test[:9], x_test)),
        torch.cat((none, y_test)),
    )
    assert found == linear_probe(x, y, x_test, y_test)


def test_constant_columns_do_no_harm() -> None:
    x, y, x_test, y_test = make_data()
    expected = linear_probe(x, y, x_test, y_test, weight_decays=[0.01])
    padded = [torch.cat((rows, torch.full((len(rows), 1), 0.1)), dim=1) for rows in (x, x_test)]
    found = linear_probe(padded[0], y, padded[1], y_test, weight_decays=[0.01])
    assert found.accuracy == expected.accuracy
    collapsed = linear_probe(torch.ones_like(x), y, torch.ones_like(x_test), y_test)
    assert collapsed.accuracy == 25.0


def test_a_large_offset_does_no_harm() -> None:
    x, y, x_test, y_test = make_data()
    x, x_test = x.double(), x_test.double()
    expected = linear_probe(x, y, x_test, y_test, weight_decays=[0.01])
    assert linear_probe(x + 1e6, y, x_test + 1e6, y_test, weight_decays=[0.01]) == expected


def test_works_on_inference_tensors_inside_inference_mode() -> None:
    data = make_data()
    expected = linear_probe(*data, weight_decays=[0.01])
    with torch.inference_mode():
        rows = tuple(part.double() if part.is_floating_point() else part + 0 for part in data)
        assert rows[0].is_inference()
        assert linear_probe(*rows, weight_decays=[0.01]) == expected  # type: ignore[arg-type]
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decays": []}, "weight_decays is"),
        ({"weight_decays": [-1.0]}, "weight_decays is"),
        ({"holdout": 0.0}, "holdout is 0.0"),
        ({"holdout": 1.0}, "holdout is 1.0"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"seed": -1}, "seed -1"),
        ({"num_classes": 3}, "classes from 0 to 2"),
        ({"train_targets": torch.full((120,), -1)}, "train_targets have 120 rows, none"),
        ({"test_targets": torch.full((200,), -1)}, "test_targets have 200 rows, none"),
        ({"test_targets": torch.full((200,), -3)}, "none of them labelled"),
        ({"train_targets": torch.arange(120) - 2}, r"train_targets lie in \[-2, 117\]"),
        ({"train_targets": torch.arange(119)}, r"\(120, 6\) and \(119,\)"),
        ({"train_features": torch.ones(120, 6, 1)}, r"\(120, 6, 1\)"),
        ({"test_features": torch.ones(200, 7)}, "6 columns, test_features 7"),
        ({"train_features": torch.full((120, 6), math.nan)}, "120 of 120 rows of train_features"),
        ({"test_features": torch.full((200, 6), math.inf)}, "200 of 200 rows of test_features"),
    ],
)
def test_rejects(change: dict[str, object], message: str) -> None:
    names = ("train_features", "train_targets", "test_features", "test_targets")
    arguments: dict[str, object] = dict(zip(names, make_data(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        linear_probe(**arguments)  # type: ignore[arg-type]


def record_draws(monkeypatch: pytest.MonkeyPatch, data: Data, **options: int) -> list[list[int]]:
    """Returns the train rows of every draw, by an index hidden in the first column."""
    drawn: list[list[int]] = []

    def probe(x: Tensor, y: Tensor, *_: object, **__: object) -> LinearProbeResult:
        drawn.append(x[:, 0].long().tolist())
        return LinearProbeResult(float(len(drawn)), 0.0, 0.0, 0.0, len(x))

    monkeypatch.setattr(linear, "linear_probe", probe)
    x, y, x_test, y_test = data
    x = torch.cat((torch.arange(len(x))[:, None], x), dim=1)
    few_label_probe(x, y, x_test, y_test, **options)
    return drawn


def test_draws_are_balanced_distinct_and_the_same_for_every_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_data()
    other = make_data(dim=9, seed=1)
    drawn = record_draws(monkeypatch, data, per_class=5, draws=4)
    assert len(drawn) == 4
    for rows in drawn:
        assert len(set(rows)) == 20
        assert Counter(data[1][rows].tolist()) == dict.fromkeys(range(4), 5)
    assert len({frozenset(rows) for rows in drawn}) == 4
    assert record_draws(monkeypatch, other, per_class=5, draws=4) == drawn
    assert record_draws(monkeypatch, other, per_class=5, draws=2) == drawn[:2]
    assert not any(rows in drawn for rows in record_draws(monkeypatch, data, per_class=5, seed=1))


def test_few_labels_never_draws_an_unlabelled_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, x_test, y_test = make_data()
    y = torch.where(torch.arange(len(y)) < 100, y, -1)
    drawn = record_draws(monkeypatch, (x, y, x_test, y_test), per_class=25, draws=1)
    assert sorted(drawn[0]) == list(range(100))


def test_few_labels_summarises_the_draws() -> None:
    data = make_data()
    mean, spread, accuracies = few_label_probe(*data, per_class=5, draws=3)
    assert len(accuracies) == 3
    assert mean == pytest.approx(sum(accuracies) / 3)
    assert spread == pytest.approx(statistics.stdev(accuracies))
    assert spread > 0
    assert few_label_probe(*data, per_class=5, draws=3) == (mean, spread, accuracies)
    whole, nothing, _ = few_label_probe(*data, per_class=30, draws=1)
    assert math.isnan(nothing)
    assert whole == linear_probe(*data, weight_decays=[0.01]).accuracy


@pytest.mark.parametrize(
    ("class_of_first_test_row", "label"), [(None, 2), (9, 9)], ids=["few rows", "no rows"]
)
def test_few_labels_names_the_class_that_is_short(
    class_of_first_test_row: int | None, label: int
) -> None:
    x, y, x_test, y_test = make_data()
    if class_of_first_test_row is None:
        x, y = torch.cat((x[y != 2], x[y == 2][:4])), torch.cat((y[y != 2], y[y == 2][:4]))
    else:
        y_test = torch.cat((torch.tensor([class_of_first_test_row]), y_test[1:]))
    with pytest.raises(ValueError, match=f"Class {label} has {4 if label == 2 else 0} train rows"):
        few_label_probe(x, y, x_test, y_test, per_class=5)


@pytest.mark.parametrize("option", ["per_class", "draws", "seed"])
def test_few_labels_rejects(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is -1"):
        few_label_probe(*make_data(), **{option: -1})  # type: ignore[arg-type]


def test_few_labels_without_any_labels() -> None:
    x, y, x_test, y_test = make_data()
    with pytest.raises(ValueError, match="none of them labelled"):
        few_label_probe(x, torch.full_like(y, -1), x_test, torch.full_like(y_test, -1))
