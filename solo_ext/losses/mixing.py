"""Which negatives MoCHi mixes, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solo_ext.kernels import MixDraws


@dataclass(frozen=True)
class Mixing:
    """Synthetic negatives of MoCHi (Kalantidis et al., NeurIPS 2020, arXiv 2010.01028).

    Args:
        num_hard: candidates most similar to the anchor, which are mixed; all where there are
            fewer.
        draws: what is mixed with what; see :func:`draw_mixes`.
        ranked: whether the draws mean the candidates from the hardest down; random ones need not.

    Raises:
        ValueError: ``num_hard`` is not positive, or the draws' shapes do not fit together.
    """

    num_hard: int
    draws: MixDraws
    ranked: bool = True

    def __post_init__(self) -> None:
        if self.num_hard < 1:
            raise ValueError(f"num_hard={self.num_hard}: must be above 0")
        pairs, alpha, singles, beta = (tuple(x.shape) for x in self.draws)
        # Their values would have to be waited for.
        if pairs != (*alpha, 2) or singles != beta or len(alpha) != 2 or alpha[0] != beta[0]:
            raise ValueError(
                f"draws={pairs}, {alpha}, {singles}, {beta}: must be (N, s, 2), (N, s), (N, s') "
                "and (N, s')"
            )

    @property
    def count(self) -> int:
        """Synthetic negatives of each anchor."""
        return self.draws.alpha.shape[1] + self.draws.beta.shape[1]


def draw_mixes(
    anchors: Tensor,
    num_hard: int,
    num_pair_mixes: int,
    num_query_mixes: int,
    generator: torch.Generator | None = None,
) -> MixDraws:
    """Draws uniformly which negatives are mixed and how; a pair is of two different ones.

    Args:
        anchors: (N, D), for number, device and dtype.
        num_hard: mined negatives of each anchor, above 0.
        num_pair_mixes: s, mixtures of two of them.
        num_query_mixes: s', mixtures of one with the anchor.
        generator: of the anchors' device; the global one by default.
    """
    rows, place = anchors.shape[0], anchors.device
    dtype = torch.float64 if anchors.dtype == torch.float64 else torch.float32

    def whole(columns: int, below: int) -> Tensor:
        # Half the memory of the usual integers; there are thousands for each anchor.
        lots = torch.int32
        return torch.randint(below, (rows, columns), generator=generator, device=place, dtype=lots)

    def real(columns: int) -> Tensor:
        lots = torch.rand((rows, columns), generator=generator, device=place, dtype=dtype)
        return lots.clamp_(min=torch.finfo(dtype).tiny)

    first = whole(num_pair_mixes, num_hard)
    second = first
    if num_hard > 1:
        second = (whole(num_pair_mixes, num_hard - 1).add_(first).add_(1)).remainder_(num_hard)
    pairs = torch.stack((first, second), 2)
    alpha, single = real(num_pair_mixes), whole(num_query_mixes, num_hard)
    return MixDraws(pairs, alpha, single, real(num_query_mixes) / 2)
