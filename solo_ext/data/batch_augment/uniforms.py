"""Uniform numbers that are a function of seed, epoch and sample, whatever else is in the batch."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from solo_ext.core.draws import mix

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def sample_keys(seed: int, epoch: int, indices: NDArray[np.int64]) -> Keys:
    """One key per sample, different for different (seed, epoch, index).

    Args:
        seed: seed of the run.
        epoch: from 0.
        indices: samples (N,).
    """
    return _scrambled((np.uint64(mix(seed, epoch)) ^ indices.astype(np.uint64)) + _GAMMA)


def uniforms(keys: Keys, first: int, count: int) -> Floats:
    """Numbers ``first`` to ``first + count`` of every key's stream, uniform in [0, 1).

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014), entered anywhere: number n of a stream is a hash of key + n * gamma.

    Args:
        keys: as :func:`sample_keys` gives them (N,).
        first: place of the first number in the streams.
        count: numbers of each.

    Returns:
        (N, count), multiples of 2**-53.
    """
    places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    bits = _scrambled(keys[:, None] + places * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _scrambled(state: Keys) -> Keys:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Keys, state ^ (state >> np.uint64(31)))
