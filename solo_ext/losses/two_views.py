"""Two views of a batch against each other and the batch."""

from __future__ import annotations

import math

from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import TwoViewContrast, two_view_contrast, two_view_fits
from solo_ext.losses.batch_of_views import batch_of_views, check_views
from solo_ext.losses.core import ContrastiveTerms, check_temperature, contrastive
from solo_ext.losses.negative_mass import PLAIN, NegativeEstimator


def two_view_terms(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator = PLAIN
) -> ContrastiveTerms:
    """Each view of each image against its other view and all views of all other images.

    As :func:`solo_ext.losses.contrastive` of a :func:`solo_ext.losses.batch_of_views`; in fewer
    operations where the batch is of this process alone and small enough.

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.
        estimator: of the mass of the negatives.

    Raises:
        ValueError: shapes differ or are not (N, D), or the temperature is not positive.
    """
    found = _at_once(z1, z2, temperature, estimator)
    if found is None:
        return _in_blocks(z1, z2, temperature, estimator)
    factor = math.log((1 - estimator.tau_plus) * (2 * len(z1) - 2))
    hardness = found.mass.log().mean().mul_(temperature).add_(1 - temperature * factor)
    if found.kept is None:
        floored = hardness.new_zeros(())
    else:
        floored = 1 - found.kept.mean(dtype=hardness.dtype)
    nan = hardness.new_full((), math.nan)
    return ContrastiveTerms(found.loss, found.losses.view(-1, 1), floored, hardness, nan, nan)


def two_view_loss(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator = PLAIN
) -> Tensor:
    """The loss of :func:`two_view_terms` alone."""
    found = _at_once(z1, z2, temperature, estimator)
    return (_in_blocks(z1, z2, temperature, estimator) if found is None else found).loss


def _at_once(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator
) -> TwoViewContrast | None:
    check_views((z1, z2))
    check_temperature(temperature)
    if distributed.world_size() > 1:
        return None
    with full_precision_products(z1.device):
        z1, z2 = full_precision(z1, z2)
        if not two_view_fits(z1, 1 / temperature, estimator.beta):
            return None
        return two_view_contrast(
            z1,
            z2,
            1 / temperature,
            estimator.tau_plus,
            estimator.beta,
            estimator.detach_weights,
        )


def _in_blocks(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator
) -> ContrastiveTerms:
    batch = batch_of_views((z1, z2))
    return contrastive(**batch._asdict(), estimator=estimator, temperature=temperature)
