"""kNN and retrieval against loops and scikit-learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation import knn
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.knn import KNN, Retrieval
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
    return (
        100 * sum(precisions) / count,
        {k: 100 * hit / count for k, hit in hits.items()},
        count,
    )


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

    monkeypatch.setattr(knn, "_MAX_ELEMENTS", block)
    monkeypatch.setattr(knn, "cosines", spy)
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


def test_query_without_an_answer_is_a_line(digits: Features) -> None:
    x, y = digits.test
    places = torch.stack([(y == c).nonzero()[0, 0] for c in range(10)])
    few = replace(digits, test=(x[places], y[places]))
    with pytest.raises(ConfigError, match=r"gallery='test': no query shares its class .*=train"):
        Retrieval().measure(few)
