"""Random numbers that are a function of a few integers, by SplitMix64.

Number ``n`` of the stream of key ``k`` is a hash of ``k + n * GAMMA``, so a stream can be read from
any position (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
These numbers depend neither on worker processes nor on ranks nor on what was drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]

LARGE = 2**24
"""For data sets with more images than this, processes keep no per-image data in their memory."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 12
"""With 8 rounds the permutations of 5 numbers are visibly not equally frequent."""


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers, such as seed, epoch and index.

    torch's CPU generator uses only the lower 32 bits of a seed: one in 4 billion pairs of argument
    lists gives the same draws.

    >>> derive_seed(0, 1) != derive_seed(1, 0)
    True
    """
    state = 0
    for part in parts:
        state = _hashed(((state ^ (part & _MASK)) + _GAMMA) & _MASK)
    return state >> 1


class StepGenerators:
    """One generator for each draw of a training step, seeded before the step.

    The numbers of a step depend only on its seed. The generators stay the same, because a CUDA
    graph knows those that its step draws from.

    Args:
        seed_of: seed of the draw ``n`` of a step, from the step's seed and ``n``.

    >>> draws = StepGenerators(derive_seed)
    >>> draws.begin(5)
    >>> a, b = (torch.rand(1, generator=draws.next(torch.device("cpu"))) for _ in range(2))
    >>> draws.begin(5)
    >>> bool(a == torch.rand(1, generator=draws.next(torch.device("cpu")))), bool(a == b)
    (True, False)
    """

    def __init__(self, seed_of: Callable[[int, int], int]) -> None:
        self._seed_of = seed_of
        self._held: list[torch.Generator] = []
        self.seed = self._drawn = 0

    def begin(self, seed: int) -> None:
        """Seeds the draws of a step."""
        self.seed, self._drawn = seed, 0
        for number, held in enumerate(self._held):
            held.manual_seed(self._seed_of(seed, number))

    def next(self, device: torch.device) -> torch.Generator | None:
        """That of the next draw; ``None`` on meta, which draws nothing."""
        if device.type == "meta":
            return None
        number, self._drawn = self._drawn, self._drawn + 1
        if number == len(self._held) or self._held[number].device.type != device.type:
            made = torch.Generator(device).manual_seed(self._seed_of(self.seed, number))
            self._held[number:] = [made]
        return self._held[number]

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter(self._held)


def sample_keys(seed: int, epoch: int, indices: NDArray[np.int64]) -> Keys:
    """One key (N,) per sample; it differs for different (seed, epoch, index).

    >>> sample_keys(5, 0, np.arange(4)).shape
    (4,)
    """
    mixed = np.uint64(derive_seed(seed, epoch)) ^ indices.astype(np.uint64)
    keys: Keys = _hashed(mixed + np.uint64(_GAMMA))
    return keys


def uniforms(keys: Keys, first: int, count: int) -> Floats:
    """Numbers ``first`` to ``first + count - 1`` of every key's stream, uniform in [0, 1).

    ``keys`` (N,) are :func:`sample_keys`; the numbers (N, count) are multiples of 2**-53.

    >>> keys = sample_keys(5, 0, np.arange(4))
    >>> bool((uniforms(keys, 0, 3)[:, 2:] == uniforms(keys, 2, 1)).all())
    True
    """
    places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    bits: Keys = _hashed(keys[:, None] + places * np.uint64(_GAMMA)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def permutation(size: int, seed: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """A permutation of 0 .. size - 1, as a function from positions (N,) to the entries there.

    Up to :data:`LARGE` it is that of ``torch.randperm``; above, :func:`feistel_permutation`
    computes only the entries asked for, because all of them would take gigabytes and a minute in
    every process.

    >>> permutation(5, seed=3)(np.arange(5))
    array([1, 0, 3, 4, 2])
    """
    if size > LARGE:
        return partial(feistel_permutation, size=size, key=derive_seed(seed))
    drawn = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    return lambda places: drawn[places]


def feistel_permutation(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Computes some entries of a permutation of 0 .. size - 1 without computing the others.

    A Feistel network: a number is a pair, ``a * right + left`` with ``a = ceil(sqrt(size))``, and
    each round adds a hash of one half to the other half, modulo the latter's range. There are up to
    ``a`` more pairs than numbers; a result of ``size`` or more goes through the network again
    (cycle walking), which at the latest ends at the position where it began.

    Args:
        places: (N,) positions, each from 0 to size - 1.
        size: of the permutation, up to 2**62.
        key: which permutation, as :func:`derive_seed` gives it.

    Returns:
        (N,) entries, distinct for distinct positions.

    >>> feistel_permutation(np.arange(6), 6, derive_seed(5, 0))
    array([4, 0, 5, 3, 2, 1])

    Source:
        Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5.
    """
    a = max(math.isqrt(max(size - 1, 0)) + 1, 1)
    sides = np.uint64(a), np.uint64(-(-size // a))
    keys = [np.uint64(derive_seed(key, number)) for number in range(_FEISTEL_ROUNDS)]
    found = places.astype(np.uint64)
    walking = np.arange(len(found))
    while len(walking):
        halves = [found[walking] % sides[0], found[walking] // sides[0]]
        for number, round_key in enumerate(keys):
            to = number % 2
            bits: Keys = _hashed(round_key + halves[1 - to] * np.uint64(_GAMMA)) >> np.uint64(32)
            # Both factors are below 2**32, and the upper half of their product is below the side.
            halves[to] = halves[to] + (bits * sides[to] >> np.uint64(32))
            halves[to] -= np.where(halves[to] >= sides[to], sides[to], np.uint64(0))
        found[walking] = halves[1] * sides[0] + halves[0]
        walking = walking[found[walking] >= size]
    return found.astype(np.int64)


def _hashed(state: Any) -> Any:
    """The output function of SplitMix64 for an ``int`` or an array of ``uint64``."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
