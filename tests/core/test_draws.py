"""Random numbers out of seeds alone: SplitMix64's published outputs, and no two keys alike."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from solo_ext.core.draws import derive_seed, feistel_permutation, permutation, uniforms


def test_mix_is_splitmix64() -> None:
    """Published first output for state 0, of which one bit is dropped."""
    assert derive_seed(0) == 0xE220A8397B1DCDAF >> 1


def test_mix_tells_numbers_apart() -> None:
    keys = [(a, b, c) for a in range(6) for b in range(12) for c in range(60)]
    keys += [(a, b) for a in range(6) for b in range(12)]  # type: ignore[misc]
    mixed = [derive_seed(*key) for key in keys]
    assert len(set(mixed)) == len(keys)
    assert all(0 <= m < 2**63 for m in mixed)
    # torch's CPU generator takes the low 32 bits of a seed.
    assert len({m & 0xFFFFFFFF for m in mixed}) == len(keys)


@given(parts=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_mix_takes_any_integer(parts: list[int]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63
    torch.Generator().manual_seed(derive_seed(*parts))


def test_uniforms_are_splitmix64() -> None:
    """The reference generator's first numbers from seed 0 (Vigna's splitmix64.c)."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [(n >> 11) * 2.0**-53 for n in first]
    assert uniforms(np.zeros(1, np.uint64), 0, 3)[0].tolist() == expected
    assert uniforms(np.zeros(1, np.uint64), 2, 1)[0].tolist() == expected[2:]


def test_permuted_is_a_bijection() -> None:
    for size in range(1, 400):
        found = feistel_permutation(np.arange(size), size, derive_seed(size))
        assert (np.sort(found) == np.arange(size)).all()
        # Entries do not depend on what they are asked with.
        assert (
            feistel_permutation(np.arange(size)[::-3], size, derive_seed(size)) == found[::-3]
        ).all()
    assert feistel_permutation(np.arange(0), 5, 0).shape == (0,)


@pytest.mark.parametrize("size", [2**24 + 1, 10**9, 2**40, 2**62])
def test_entries_of_large_permutations(size: int) -> None:
    """They are distinct numbers, spread evenly, and others with another key."""
    places = np.linspace(0, size - 1, 20_000).astype(np.int64)
    found = feistel_permutation(places, size, 1)
    assert len(set(found.tolist())) == len(places)
    assert found.min() >= 0
    assert found.max() < size
    assert stats.kstest(found / size, "uniform").pvalue > 1e-3
    neighbours = feistel_permutation(places[:-1] + 1, size, 1)
    assert abs(np.corrcoef(found[:-1], neighbours)[0, 1]) < 0.03
    assert (feistel_permutation(places, size, 2) != found).mean() > 0.99


@pytest.mark.parametrize("size", [3, 5, 12])
def test_every_permutation_is_equally_likely(size: int) -> None:
    """Chi-squared tests of which number comes at each place, and which pairs come at neighbours."""
    times = 3000
    drawn = np.stack(
        [feistel_permutation(np.arange(size), size, derive_seed(7, key)) for key in range(times)]
    )
    counts = np.stack([np.bincount(column, minlength=size) for column in drawn.T])
    squares = ((counts - times / size) ** 2).sum() / (times / size)
    chances = [stats.chi2.sf(squares, (size - 1) ** 2)]
    for first, second in zip(drawn.T, drawn.T[1:], strict=False):
        pairs = np.bincount(first * size + second, minlength=size**2).reshape(size, size)
        chances.append(stats.chisquare(pairs[~np.eye(size, dtype=bool)]).pvalue)
    assert min(chances) > 1e-4


def test_permutations_are_drawn_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to it they are torch's, which committed records were made with."""
    drawn = torch.randperm(9, generator=torch.Generator().manual_seed(3)).tolist()
    assert permutation(9, 3)(np.arange(9)).tolist() == drawn
    monkeypatch.setattr("solo_ext.core.draws.LARGE", 8)
    assert (
        permutation(9, 3)(np.arange(9)).tolist()
        == feistel_permutation(np.arange(9), 9, derive_seed(3)).tolist()
    )
    assert (
        permutation(8, 3)(np.arange(8)).tolist()
        != feistel_permutation(np.arange(8), 8, derive_seed(3)).tolist()
    )
