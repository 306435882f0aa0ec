"""Estimates of how much negatives weigh in a contrastive loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Mass(NamedTuple):
    """An estimate, anchor by anchor.

    Attributes:
        log_mass: (N,) log of the sum of exponentials that the negatives stand for.
        floored: (N,) bool, whether it sits on its floor and passes no gradient on.
    """

    log_mass: Tensor
    floored: Tensor


@dataclass(frozen=True)
class NegativeEstimator:
    """Estimate of the summed exponentials of true negatives, from samples that are not all true.

    ``N max((R - tau_plus P) / (1 - tau_plus), exp(-1 / T))`` with ``R`` the mean of
    ``exp(s_k)`` over the N candidates, weighted by ``exp(beta s_k)``, ``P`` that over the
    positives, and s the cosine over the temperature T: plain with ``tau_plus = beta = 0``,
    debiased with ``beta = 0``, hard with both.

    Args:
        tau_plus: in [0, 1), share of candidates that are of the anchor's own class.
        beta: 0 or more, concentration on the candidates most similar to the anchor.
        detach_weights: no gradient through the weights.

    Raises:
        ValueError: an argument is out of range.

    Source:
        Chuang et al., NeurIPS 2020, arXiv 2007.00224, Eq. 7 and 8; Robinson et al., ICLR 2021,
        arXiv 2010.04592.
    """

    tau_plus: float = 0.0
    beta: float = 0.0
    detach_weights: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tau_plus < 1:
            raise ValueError(f"tau_plus={self.tau_plus}: must lie in [0, 1)")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta={self.beta}: must be 0 or more")

    @property
    def powers(self) -> tuple[float, ...]:
        """Powers of ``exp(s)`` whose log-sum-exp over the candidates the estimate needs."""
        return (1 + self.beta, self.beta) if self.beta else (1.0,)

    def __call__(self, lse: Tensor, positives: Tensor, count: int, temperature: float) -> Mass:
        """The estimate from log-sum-exps.

        Args:
            lse: (E, N) over the candidates, one row for each of :attr:`powers`.
            positives: (N, P) samples of the positives, cosine over temperature.
            count: number of candidates, above 0.
            temperature: above 0.
        """
        log_count = math.log(count)
        mass = self._weighted(lse, log_count)
        if not self.tau_plus:
            return Mass(mass, torch.zeros_like(mass, dtype=torch.bool))
        if self.beta and positives.shape[1] > 1:
            both = [(power * positives).logsumexp(1) for power in self.powers]
            own = self._weighted(torch.stack(both), log_count)
        else:
            own = positives.logsumexp(1) + (log_count - math.log(positives.shape[1]))
        # Exponentials relative to the larger of the two: none overflows, and the difference
        # loses nothing that the original form would keep.
        pivot = torch.maximum(mass, own).detach()
        rest = ((mass - pivot).exp() - self.tau_plus * (own - pivot).exp()) / (1 - self.tau_plus)
        above_zero = rest > 0
        estimate = pivot + torch.where(above_zero, rest, 1.0).log()
        floor = log_count - 1 / temperature
        floored = ~above_zero | (estimate <= floor)
        return Mass(torch.where(floored, floor, estimate), floored.detach())

    def _weighted(self, lse: Tensor, log_count: float) -> Tensor:
        if not self.beta:
            return lse[0]
        hard, weights = lse.unbind()
        if self.detach_weights:
            # The slope of exp(s) alone, weights held fixed.
            hard = hard.detach() + (hard - hard.detach()) / (1 + self.beta)
            weights = weights.detach()
        return hard - weights + log_count


PLAIN = NegativeEstimator()
"""Every candidate is a negative and counts once."""
