"""kNN, retrieval, clusters and geometry: against loops, scikit-learn and the losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation import scores
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol
from solo_ext.lab.evaluation.scores import (
    KNN,
    Clustering,
    Geometry,
    Retrieval,
    _cluster_scores,
    _feature_geometry,
)
from solo_ext.losses import alignment_loss_func, uniformity_loss_func
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory.knn import cosines


def by_loop(
    queries: Tensor, targets: Tensor, gallery: Tensor, labels: Tensor, ks: list[int], alone: bool
) -> tuple[float, dict[int, float], int]:
    precisions, hits = [], dict.fromkeys(ks, 0)
    for i, query in enumerate(queries):
        kept = [j for j in range(len(gallery)) if not (alone and i == j)]
        similarity = F.cosine_similarity(query[None].double(), gallery[kept].double())
        relevant = [bool(labels[j] == targets[i]) for j in kept]
        if not any(relevant):
            continue
        order = sorted(range(len(kept)), key=lambda j: -float(similarity[j]))
        seen, total = 0, 0.0
        for rank, j in enumerate(order, start=1):
            if relevant[j]:
                seen += 1
                total += seen / rank
        precisions.append(total / seen)
        for k in ks:
            hits[k] += any(relevant[j] for j in order[:k])
    count = len(precisions)
    return (100 * sum(precisions) / count, {k: 100 * hit / count for k, hit in hits.items()}, count)


def rows(count: int, seed: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return x, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize(("alone", "block"), [(True, 200), (False, 1), (False, 2**20)])
def test_equals_a_loop(alone: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no table has more elements than a block, or than one query needs."""

    def spy(*given: Tensor) -> Tensor:
        table = cosines(*given)
        assert table.numel() <= max(block, table.shape[1])
        return table

    monkeypatch.setattr(scores, "_RANKED", block)
    monkeypatch.setattr(scores, "cosines", spy)
    (x, y), (gallery, labels) = rows(30, 0), rows(41, 1)
    gallery = gallery * torch.rand(41, 1)
    ks = [1, 3, 100]
    features = Features((gallery, labels), (x, y), list("abcd"))
    (found,) = Retrieval(k=ks, gallery="test" if alone else "train").measure(features)
    expected = by_loop(x, y, *((x, y) if alone else (gallery, labels)), ks, alone)
    assert found["map"] == pytest.approx(expected[0], abs=1e-4)
    for k in ks:
        assert found[f"recall_{k}"] == pytest.approx(expected[1][k], abs=1e-4)
    assert found["queries"] == expected[2]


def test_queries_without_an_answer_are_left_out() -> None:
    x, y = rows(12, 4, classes=2)
    test = torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([99])])
    (found,) = Retrieval().measure(Features(test, test, []))
    assert found["queries"] == 12


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.5)])
def test_knn_is_that_of_scikit_learn(k: int, temperature: float, digits: Features) -> None:
    def votes(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / temperature)

    # In double precision there, so that no tie is decided by rounding here alone.
    theirs = KNeighborsClassifier(k, weights=votes, metric="cosine", algorithm="brute")
    theirs.fit(digits.train[0].double().numpy(), digits.train[1].numpy())
    expected = 100 * theirs.score(digits.test[0].double().numpy(), digits.test[1].numpy())
    settings = {"k": [k], "temperature": [temperature]}
    (row,) = KNN.model_validate(settings).measure(digits)
    assert row["acc1"] == pytest.approx(expected, abs=1e-9)


def best_by_trying(targets: Tensor, assignments: Tensor, classes: int, clusters: int) -> float:
    size = max(classes, clusters)
    counts = [
        sum(int(p[a] == t) for a, t in zip(assignments.tolist(), targets.tolist(), strict=True))
        for p in itertools.permutations(range(size))
    ]
    return 100 * max(counts) / len(targets)


@pytest.mark.parametrize(("classes", "clusters"), [(4, 4), (3, 5), (5, 3)])
def test_accuracy_is_the_best_matching(classes: int, clusters: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(classes, (60,), generator=generator)
    assignments = torch.randint(clusters, (60,), generator=generator)
    expected = best_by_trying(targets, assignments, classes, clusters)
    assert _cluster_scores(targets, assignments)["accuracy"] == pytest.approx(expected)


def test_known_clusterings() -> None:
    four = torch.arange(4).repeat(5)
    perfect = _cluster_scores(four, (four * 3 + 1) % 4 + 10)
    assert perfect == pytest.approx({"nmi": 100, "ari": 100, "accuracy": 100, "purity": 100})
    one = _cluster_scores(four, torch.zeros(20, dtype=torch.int64))
    assert one == pytest.approx({"nmi": 0, "ari": 0, "accuracy": 25, "purity": 25})
    # A cluster each is pure, and still wrong.
    each = _cluster_scores(four, torch.arange(20))
    assert (each["purity"], each["accuracy"]) == (100, 20)


def cloud(count: int = 60, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator) + 0.5
    return x, torch.randint(4, (count,), generator=generator)


@pytest.mark.parametrize("block", [500, 2**20])
def test_equals_the_losses(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solo_ext.lab.evaluation.scores._COMPARED", block)
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
    (row,) = Geometry(samples=20).measure(features)
    assert (row["images"], row["class_alignment"]) == (20, None)
    (again,) = Geometry(samples=20, seed=1).measure(features)
    assert again["uniformity"] != row["uniformity"]


def whole(features: Features) -> Features:
    return features


def first_of_each(features: Features) -> Features:
    x, y = features.test
    places = torch.stack([(y == c).nonzero()[0, 0] for c in range(10)])
    return Features(features.train, (x[places], y[places]), features.class_names)


def of_one_class(features: Features) -> Features:
    train, test = ((x, torch.zeros_like(y)) for x, y in (features.train, features.test))
    return Features(train, test, ["0"])


def of_one_image(features: Features) -> Features:
    x, y = features.test
    return Features(features.train, (x[:1], y[:1]), features.class_names)


@pytest.mark.parametrize(
    ("protocol", "change", "line"),
    [
        (Retrieval(), first_of_each, r"gallery='test': no query shares its class .*=train"),
        (Clustering(), of_one_class, "k=null: there is one class"),
        (Clustering(k=[5000]), whole, r"k\.0=5000: the test split has 797 labelled images"),
        (Geometry(), of_one_image, r"split='test': it has one image,.*=train"),
    ],
)
def test_features_that_a_protocol_cannot_take(
    protocol: FeatureProtocol, change: Callable[[Features], Features], line: str, digits: Features
) -> None:
    with pytest.raises(ConfigError, match=line):
        protocol.measure(change(digits))


def test_one_class_in_given_clusters(digits: Features) -> None:
    (row,) = Clustering(k=[2]).measure(of_one_class(digits))
    assert row["accuracy"] < 100
