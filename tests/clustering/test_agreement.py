"""Matching against all permutations; mutual information against scikit-learn's."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from solo_ext.clustering import agreement
from solo_ext.clustering.agreement import match_clusters, normalized_mutual_information
from solo_ext.memory.heads import ClassWeights


def overlap(old: Tensor, new: Tensor, match: list[int]) -> int:
    """Number of samples that stay in their cluster."""
    pairs = zip(old.tolist(), new.tolist(), strict=True)
    return sum(a >= 0 and b >= 0 and match[b] == a for a, b in pairs)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 5))
def test_no_permutation_keeps_more_samples(data: st.DataObject, count: int) -> None:
    ids = st.integers(-1, count - 1)
    pairs = data.draw(st.lists(st.tuples(ids, ids), max_size=25))
    old = torch.tensor([p[0] for p in pairs], dtype=torch.int64)
    new = torch.tensor([p[1] for p in pairs], dtype=torch.int64)
    match = match_clusters(old, new, count)
    assert match.dtype == torch.int64
    assert sorted(match.tolist()) == list(range(count))
    best = max(overlap(old, new, list(p)) for p in permutations(range(count)))
    assert overlap(old, new, match.tolist()) == best


def test_undoes_a_renumbering() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(20, (500,), generator=generator)
    order = torch.randperm(20, generator=generator)
    new = order[old]
    # Old cluster c is now called order[c].
    assert torch.equal(match_clusters(old, new, 20)[order], torch.arange(20))
    noisy = torch.where(torch.rand(500, generator=generator) < 0.3, new.roll(1), new)
    assert torch.equal(match_clusters(old, noisy, 20)[order], torch.arange(20))


def test_is_one_to_one_where_the_largest_overlap_is_not() -> None:
    """New clusters 0 and 1 are both mostly of old 0; what counts is the sum."""
    old = torch.tensor([0] * 5 + [1] * 2 + [0] * 6 + [1] * 1)
    new = torch.tensor([0] * 5 + [0] * 2 + [1] * 6 + [1] * 1)
    assert match_clusters(old, new, 2).tolist() == [1, 0]


def test_unassigned_samples_do_not_count() -> None:
    old = torch.tensor([0, 1, -1, -1, -1, 1, 1])
    new = torch.tensor([1, 0, 1, 1, 1, -1, -1])
    assert match_clusters(old, new, 2).tolist() == [1, 0]
    none = torch.full((4,), -1)
    assert match_clusters(none, none, 3).tolist() == [0, 1, 2]
    assert match_clusters(none[:0], none[:0], 3).tolist() == [0, 1, 2]


def test_takes_any_whole_numbers() -> None:
    old = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    new = torch.tensor([2, 0, 1, 1], dtype=torch.int16)
    assert match_clusters(old, new, 3).tolist() == [1, 2, 0]


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randint(-1, 6, (2, 500), generator=generator)
    whole = match_clusters(old, new, 6)
    monkeypatch.setattr(agreement, "_COUNTED", 7)
    assert torch.equal(match_clusters(old, new, 6), whole)


def test_memory_is_bounded() -> None:
    from torch.profiler import ProfilerActivity, profile

    old = torch.arange(2_000_000) % 5
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        match_clusters(old, old, 5)
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    # A block of some vectors, of the samples none.
    assert 8 * agreement._COUNTED < peak < 8 * len(old)


def test_rematched_weights_give_samples_their_old_classes() -> None:
    """The weights that a sample's old class had are those of its new class."""
    torch.manual_seed(0)
    head, old = ClassWeights(5, 3), torch.arange(40) % 5
    new = torch.tensor([3, 1, 4, 0, 2])[old]
    before = head.weight.detach()[old]
    head.rematch_(match_clusters(old, new, 5))
    assert torch.equal(head.weight[new], before)


@pytest.mark.parametrize(
    ("old", "new", "count", "message"),
    [
        ([0, 1], [0], 2, r"\(2,\) and \(1,\)"),
        ([[0], [1]], [[0], [1]], 2, r"\(2, 1\) and \(2, 1\)"),
        ([0, 2], [0, 1], 2, r"old_assignments lie in \[0, 2\]"),
        ([0, 1], [-2, 1], 2, r"new_assignments lie in \[-2, 1\]"),
        ([0, 0], [0, 0], 0, "num_classes=0"),
    ],
)
def test_refuses(old: list[int], new: list[int], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        match_clusters(torch.tensor(old), torch.tensor(new), count)


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
