"""Normalised mutual information against scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from solo_ext.clustering import agreement
from solo_ext.clustering.agreement import normalized_mutual_information


def expected(assignments: Tensor, labels: Tensor) -> float:
    return float(normalized_mutual_info_score(labels.numpy(), assignments.numpy()))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_is_that_of_sklearn(data: st.DataObject, clusters: int, classes: int) -> None:
    """With empty clusters and classes, a single one, and one for each sample."""
    pair = st.tuples(st.integers(0, clusters - 1), st.integers(0, classes - 1))
    pairs = torch.tensor(data.draw(st.lists(pair, min_size=1, max_size=40)))
    found = normalized_mutual_information(*pairs.T)
    assert found == pytest.approx(expected(*pairs.T), abs=1e-12)


def test_ends_of_the_scale() -> None:
    labels = torch.arange(60) % 6
    one = torch.zeros_like(labels)
    assert normalized_mutual_information(one, one) == 1
    assert normalized_mutual_information(one, labels) == pytest.approx(0, abs=1e-12)
    assert normalized_mutual_information(labels, one) == pytest.approx(0, abs=1e-12)
    assert normalized_mutual_information(labels * 7 + 3, labels) == pytest.approx(1, abs=1e-12)
    # Of every cluster and class there is one sample.
    apart = torch.arange(60) // 6
    assert normalized_mutual_information(apart, labels) == pytest.approx(0, abs=1e-12)


def test_many_samples_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(100, (50_000,), generator=generator)
    noise = torch.randint(3000, (50_000,), generator=generator)
    assignments = torch.where(noise < 2000, noise, labels)
    monkeypatch.setattr(agreement, "_PAIRED", 999)
    found = normalized_mutual_information(assignments, labels)
    assert found == pytest.approx(expected(assignments, labels), abs=1e-12)
    assert 0.2 < found < 0.8
