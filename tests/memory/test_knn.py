"""Tests of the weighted kNN classifier against loops and scikit-learn."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.memory.knn import OnlineKNN, Setting, class_scores, knn_accuracy

CLASSES = 6
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def make_data(queries: int = 23, bank: int = 41, dim: int = 8, seed: int = 0) -> Data:
    """Returns queries, their targets, a bank and its targets, with overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, dim, generator=generator)
    bank_targets = torch.arange(bank) % CLASSES
    targets = torch.arange(queries) % CLASSES
    scales = 0.1 + 5 * torch.rand(queries + bank, 1, generator=generator)
    noise = torch.randn(queries + bank, dim, generator=generator)
    rows = scales * (centres[torch.cat((targets, bank_targets))] + noise)
    return rows[:queries], targets, rows[queries:], bank_targets


def predict(
    features: Tensor, bank: Tensor, bank_targets: Tensor, **options: Any
) -> dict[Setting, Tensor]:
    """The scores of all queries."""
    options = {"ks": [5], "temperatures": [0.07], "num_classes": CLASSES, **options}
    blocks = list(class_scores(features, bank, bank_targets, **options))
    return {setting: torch.cat([block[setting] for block in blocks]) for setting in blocks[0]}


def loop_votes(
    weigh: Callable[[list[float], list[float]], float],
    similarity: Callable[[list[float], list[float]], float],
    data: Data,
    k: int,
) -> list[list[float]]:
    """Scores by the definition, one row and one neighbour at a time."""
    features, _, bank, bank_targets = (rows.tolist() for rows in data)
    scores = []
    for query in features:
        nearest = sorted(range(len(bank)), key=lambda i: -similarity(query, bank[i]))[:k]
        row = [0.0] * CLASSES
        for i in nearest:
            row[bank_targets[i]] += weigh(query, bank[i])
        scores.append(row)
    return scores


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def loop_accuracy(scores: list[list[float]], targets: list[int], topk: int) -> float:
    hits = 0
    for row, target in zip(scores, targets, strict=True):
        voted = [c for c in sorted(range(len(row)), key=lambda c: -row[c])[:topk] if row[c] > 0]
        hits += target in voted
    return 100.0 * hits / len(targets)


@pytest.mark.parametrize("k", [1, 3, 10, 41])
@pytest.mark.parametrize("temperature", [0.05, 0.07, 0.5])
def test_scores_equal_the_loop_up_to_a_factor_per_query(k: int, temperature: float) -> None:
    data = make_data()
    found = predict(data[0], data[2], data[3], ks=[k], temperatures=[temperature])[k, temperature]
    loop = loop_votes(lambda a, b: math.exp(cosine(a, b) / temperature), cosine, data, k)
    expected = torch.tensor(loop, dtype=torch.float64)
    strongest = torch.tensor(
        [max(cosine(a, b) for b in data[2].tolist()) for a in data[0].tolist()],
        dtype=torch.float64,
    )
    expected = expected / (strongest / temperature).exp()[:, None]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    assert found.dtype == torch.float32


def test_one_call_scores_every_setting_like_separate_calls() -> None:
    """In blocks of any size; a k beyond the bank is the whole bank."""
    features, _, bank, bank_targets = make_data()
    ks, temperatures = (10, 1, 3, 41, 500), (0.07, 0.02)
    data = features, bank, bank_targets
    together = predict(*data, ks=ks, temperatures=temperatures)
    assert set(together) == {(k, t) for k in ks for t in temperatures}
    for k, t in together:
        alone = predict(*data, ks=[k], temperatures=[t], max_elements=len(bank) * (1 + k % 4))
        torch.testing.assert_close(together[k, t], alone[k, t])
    torch.testing.assert_close(together[500, 0.07], together[41, 0.07], rtol=0, atol=0)


def test_similarities_are_in_one_pass_of_bounded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def spy(queries: Tensor, bank: Tensor, scale: Tensor) -> Tensor:
        sizes.append(len(queries) * len(bank))
        return queries @ bank.T

    monkeypatch.setattr("solo_ext.memory.knn._MAX_ELEMENTS", 200)
    monkeypatch.setattr("solo_ext.memory.knn.cosines", spy)
    features, _, bank, bank_targets = make_data()
    predict(features, bank, bank_targets, ks=[1, 5], temperatures=[0.1, 1.0])
    assert sum(sizes) == len(features) * len(bank), "more than one pass"
    assert max(sizes) <= 200


def test_low_temperature_neither_overflows_nor_loses_votes() -> None:
    bank, classes = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([2, 1])
    for row in predict(bank[:1], bank, classes, ks=[2], temperatures=[0.01, 1e-4]).values():
        assert row.isfinite().all()
        assert row[0, 2] == 1.0
        assert row[0, 1] > 0.0
        assert row[0, 0] == 0.0


def test_norm_and_half_precision_autocast_do_not_matter() -> None:
    features, _, bank, bank_targets = make_data()
    expected = predict(features, bank, bank_targets, temperatures=[0.01])
    scaled = predict(features * 64, bank / 32, bank_targets, temperatures=[0.01])
    torch.testing.assert_close(scaled, expected)
    with torch.autocast("cpu", torch.bfloat16):
        cast = predict(features, bank, bank_targets, temperatures=[0.01])
    torch.testing.assert_close(cast, expected)


@pytest.mark.parametrize("k", [2, 7, 20])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_accuracy_equals_the_loop(k: int, temperature: float) -> None:
    data = make_data(50, 60)
    found = knn_accuracy(*data, ks=[k, 1], temperatures=[temperature, 0.3], topk=(1, 2, 5))
    scores = loop_votes(lambda a, b: math.exp(cosine(a, b) / temperature), cosine, data, k)
    for topk, accuracy in found[k, temperature].items():
        assert accuracy == pytest.approx(loop_accuracy(scores, data[1].tolist(), topk))


@pytest.mark.parametrize("lacking", ["bank", "queries"])
def test_a_class_that_one_side_lacks(lacking: str) -> None:
    rows = torch.eye(3)
    few, all_ = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    if lacking == "bank":
        found = knn_accuracy(rows, all_, rows[:2], few, ks=[1], temperatures=[0.1])
        assert found[1, 0.1] == pytest.approx({1: 200 / 3, 5: 200 / 3})
    else:
        found = knn_accuracy(rows[:2], few, rows, all_, ks=[1], temperatures=[0.1])
        assert found[1, 0.1] == {1: 100.0, 5: 100.0}


def test_classes_without_votes_earn_no_top_5_credit() -> None:
    rows = torch.eye(4)
    wrong = torch.tensor([1, 0, 3, 2])
    found = knn_accuracy(rows, torch.arange(4), rows, wrong, ks=[1], temperatures=[0.1])
    assert found[1, 0.1] == {1: 0.0, 5: 0.0}


def test_unlabelled_rows_are_dropped_on_both_sides() -> None:
    features, targets, bank, bank_targets = make_data()
    expected = knn_accuracy(features, targets, bank, bank_targets)
    found = knn_accuracy(
        torch.cat((features[:3], features)),
        torch.cat((torch.full((3,), -1), targets)),
        torch.cat((features, bank)),
        torch.cat((torch.full((len(features),), -1), bank_targets)),
    )
    assert found == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.empty(0, 8), "targets": torch.empty(0)}, "features has 0 rows"),
        ({"bank_targets": torch.full((41,), -1)}, "bank has 41 rows, none of them labelled"),
        ({"ks": [0]}, r"ks=\[0\]"),
        ({"temperatures": [0.0]}, r"temperatures=\[0.0\]"),
    ],
)
def test_accuracy_rejects(change: dict[str, Any], message: str) -> None:
    names = ("features", "targets", "bank", "bank_targets")
    arguments: dict[str, Any] = dict(zip(names, make_data(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        knn_accuracy(**arguments)


def feed(metric: OnlineKNN, data: Data, parts: int = 3) -> None:
    features, targets, bank, bank_targets = (rows.chunk(parts) for rows in data)
    for batch, labels in zip(bank, bank_targets, strict=True):
        metric(train_features=batch, train_targets=labels)
    for batch, labels in zip(features, targets, strict=True):
        metric(test_features=batch, test_targets=labels)


@pytest.mark.parametrize("size", [1, 100, 2**24])
def test_online_cosine_equals_knn_accuracy(size: int) -> None:
    data = make_data(50, 60)
    metric = OnlineKNN(k=7, T=0.1, max_distance_matrix_size=size)
    feed(metric, data)
    expected = knn_accuracy(*data, ks=[7], temperatures=[0.1])[7, 0.1]
    assert metric.compute() == (expected[1], expected[5])
    assert 20 < expected[1] < expected[5]


@pytest.mark.parametrize("epsilon", [1e-5, 2.0])
def test_online_euclidean_equals_the_loop(epsilon: float) -> None:
    data = make_data(50, 60)
    # solo-learn's main_knn.py gives no temperature here.
    metric = OnlineKNN(k=7, T=None, distance_fx="euclidean", epsilon=epsilon)
    feed(metric, data)

    def inverse(a: list[float], b: list[float]) -> float:
        return 1 / (math.dist(a, b) + epsilon)

    scores = loop_votes(inverse, inverse, data, 7)
    truth = data[1].tolist()
    expected = loop_accuracy(scores, truth, 1), loop_accuracy(scores, truth, 5)
    assert metric.compute() == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_second_compute_is_not_stale() -> None:
    rows, labels = torch.eye(3), torch.arange(3)
    metric = OnlineKNN(k=1)
    feed(metric, (rows, labels, rows, labels), parts=1)
    assert metric.compute() == (100.0, 100.0)
    with pytest.warns(UserWarning, match="0 labelled train and 0 labelled test rows"):
        assert all(map(math.isnan, metric.compute()))
    feed(metric, (rows, labels, rows, labels.roll(1)), parts=1)
    assert metric.compute() == (0.0, 0.0)


@pytest.mark.parametrize("side", ["train", "test"])
@pytest.mark.parametrize("labels", [torch.arange(3), torch.full((3,), -1)])
def test_one_side_missing_gives_nan_and_forgets(side: str, labels: Tensor) -> None:
    metric = OnlineKNN(k=1)
    metric(**{f"{side}_features": torch.eye(3), f"{side}_targets": labels})
    with pytest.warns(UserWarning, match="it needs both"):
        top1, top5 = metric.compute()
    assert math.isnan(top1)
    assert math.isnan(top5)
    assert not metric.train_features
    assert not metric.test_features


@pytest.mark.parametrize("side", ["train", "test"])
@pytest.mark.parametrize(
    ("rows", "targets", "says"),
    [(3, None, "3 and None rows"), (None, 3, "None and 3 rows"), (3, 2, "3 and 2 rows")],
)
def test_online_rejects_features_without_their_targets(
    side: str, rows: int | None, targets: int | None, says: str
) -> None:
    given = {
        f"{side}_features": None if rows is None else torch.eye(rows),
        f"{side}_targets": None if targets is None else torch.arange(targets),
    }
    with pytest.raises(ValueError, match=says):
        OnlineKNN()(**given)


def test_forward_only_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("computed or synchronised in a step")

    metric = OnlineKNN(dist_sync_on_step=True)
    monkeypatch.setattr(metric, "compute", forbidden)
    monkeypatch.setattr(metric, "sync", forbidden)
    features = torch.eye(3, requires_grad=True)
    for batches in (1, 2):
        assert metric(train_features=features, train_targets=torch.arange(3)) is None
        assert len(metric.train_features) == batches
    assert not metric.train_features[0].requires_grad


def test_distributed_compute_uses_the_rows_of_every_process_and_resets() -> None:
    rows, labels = torch.eye(4), torch.arange(4)
    metric = OnlineKNN(k=1)
    metric.distributed_available_fn = lambda: True
    # The other process holds the classes that this one lacks.
    metric.dist_sync_fn = lambda state, group: [
        state,
        state.roll(2, -1) if state.ndim == 2 else state + 2,
    ]
    feed(metric, (rows[:2], labels[:2], rows[:2], labels[:2]), parts=1)
    assert metric.compute() == (100.0, 100.0)
    metric(train_features=rows, train_targets=labels)
    assert len(metric.train_features) == 1
    assert not metric.test_features


def test_online_accepts_half_precision_and_unlabelled_rows() -> None:
    rows, labels = torch.eye(4), torch.tensor([0, 1, 2, -1])
    metric = OnlineKNN(k=1)
    feed(metric, (rows, labels, rows.bfloat16(), labels.int()), parts=2)
    assert metric.compute() == (100.0, 100.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_equals_cpu() -> None:
    features, _, bank, bank_targets = make_data()
    expected = predict(features, bank, bank_targets)[5, 0.07]
    found = predict(features.cuda(), bank, bank_targets)[5, 0.07]
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-5)
