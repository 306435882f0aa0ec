"""Random numbers out of seeds alone: SplitMix64's published outputs, and no two keys alike."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from solo_ext.core.draws import mix, uniforms


def test_mix_is_splitmix64() -> None:
    """Published first output for state 0, of which one bit is dropped."""
    assert mix(0) == 0xE220A8397B1DCDAF >> 1


def test_mix_tells_numbers_apart() -> None:
    keys = [(a, b, c) for a in range(6) for b in range(12) for c in range(60)]
    keys += [(a, b) for a in range(6) for b in range(12)]  # type: ignore[misc]
    mixed = [mix(*key) for key in keys]
    assert len(set(mixed)) == len(keys)
    assert all(0 <= m < 2**63 for m in mixed)
    # torch's CPU generator takes the low 32 bits of a seed.
    assert len({m & 0xFFFFFFFF for m in mixed}) == len(keys)


@given(parts=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_mix_takes_any_integer(parts: list[int]) -> None:
    assert 0 <= mix(*parts) < 2**63
    torch.Generator().manual_seed(mix(*parts))


def test_uniforms_are_splitmix64() -> None:
    """The reference generator's first numbers from seed 0 (Vigna's splitmix64.c)."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [(n >> 11) * 2.0**-53 for n in first]
    assert uniforms(np.zeros(1, np.uint64), 0, 3)[0].tolist() == expected
    assert uniforms(np.zeros(1, np.uint64), 2, 1)[0].tolist() == expected[2:]
