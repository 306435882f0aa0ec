"""Clusters against classes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.clustering import Clusters, _cluster_scores
from solo_ext.lab.evaluation.features import Features


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
    perfect = _cluster_scores(FOUR, (FOUR * 3 + 1) % 4 + 10)
    assert perfect == pytest.approx({"nmi": 100, "ari": 100, "accuracy": 100, "purity": 100})
    one = _cluster_scores(FOUR, torch.zeros(20, dtype=torch.int64))
    assert one == pytest.approx({"nmi": 0, "ari": 0, "accuracy": 25, "purity": 25})
    # A cluster each is pure, and still wrong.
    each = _cluster_scores(FOUR, torch.arange(20))
    assert (each["purity"], each["accuracy"]) == (100, 20)


FOUR = torch.arange(4).repeat(5)


def test_one_class_is_no_clustering(digits: Features) -> None:
    x, y = digits.test
    one = replace(digits, test=(x, torch.zeros_like(y)), class_names=["0"])
    with pytest.raises(ConfigError, match="k=null: there is one class"):
        Clusters().measure(one)
    (row,) = Clusters(k=[2]).measure(one)
    assert row["accuracy"] < 100


def test_more_clusters_than_images(digits: Features) -> None:
    with pytest.raises(ConfigError, match=r"k\.0=5000: the test split has 797 labelled images"):
        Clusters(k=[5000]).measure(digits)
