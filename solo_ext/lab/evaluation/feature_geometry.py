"""How features lie in their space, and whether they have collapsed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.geometry import effective_rank
from solo_ext.memory.knn import cosines, inverse_norms

_MAX_ELEMENTS = 2**23
_DEAD = 1e-4
"""Deviation, beside the largest one, below which a dimension is dead."""


@dataclass(frozen=True)
class Geometry:
    """What :func:`feature_geometry` measured.

    Attributes:
        effective_rank: of the features as they are, in [1, min(n, D)].
        uniformity: ``log mean_{i != j} exp(-2 |x_i - x_j|^2)`` of unit rows, at most 0.
        class_alignment: mean ``|x_i - x_j|^2`` of unit rows over pairs of the same class, in
            [0, 4]; nan where no class has two rows.
        mean_cosine: over pairs of rows; 1 where all point the same way.
        std: mean deviation of the dimensions of unit rows, times ``sqrt(D)``: about 1 for a cloud
            that is the same in all directions, 0 for a collapsed one.
        dead: share of the dimensions that hardly move, in percent.
        mean_norm: mean length of the rows.
    """

    effective_rank: float
    uniformity: float
    class_alignment: float
    mean_cosine: float
    std: float
    dead: float
    mean_norm: float


@torch.no_grad()
def feature_geometry(features: Tensor, targets: Tensor) -> Geometry:
    """Measures the spread of features.

    Takes n^2 D operations, and memory for a copy of the features and a bounded table.

    Args:
        features: (n, D), n at least 2, finite.
        targets: (n,) classes.

    Raises:
        ValueError: fewer than two rows.

    Source:
        Effective rank: Garrido et al., ICML 2023, arXiv 2210.02885. Alignment and uniformity: Wang
        and Isola, ICML 2020, arXiv 2005.10242. Deviation: Chen and He, CVPR 2021, arXiv 2011.10566.
    """
    if len(features) < 2:
        raise ValueError(f"{len(features)} rows; the geometry of features needs at least two")
    x = features.float()
    deviations = x.std(dim=0, correction=0)
    unit = F.normalize(x, dim=1)
    count = len(x)
    # |sum_i x_i|^2 holds every pair twice, and every row once with itself.
    pairs = float(unit.double().sum(0).square().sum() - unit.double().square().sum())
    return Geometry(
        effective_rank=float(effective_rank(x)),
        uniformity=_uniformity(unit),
        class_alignment=_class_alignment(unit, targets.to(x.device)),
        mean_cosine=pairs / (count * (count - 1)),
        std=float(unit.std(dim=0, correction=0).mean()) * math.sqrt(x.shape[1]),
        dead=100 * float((deviations <= _DEAD * deviations.max()).float().mean()),
        mean_norm=float(x.norm(dim=1).mean()),
    )


def _uniformity(unit: Tensor, t: float = 2.0) -> float:
    count, scale = len(unit), inverse_norms(unit)
    size = max(1, _MAX_ELEMENTS // count)
    masses = []
    for start in range(0, count, size):
        block = cosines(unit[start : start + size], unit, scale)
        # Unit rows: |x - y|^2 = 2 - 2 x.y.
        potentials = block.mul_(2 * t).sub_(2 * t)
        own = torch.arange(len(block), device=block.device)
        potentials[own, start + own] = float("-inf")
        masses.append(potentials.logsumexp(1))
    mass = torch.cat(masses).double().logsumexp(0)
    return float(mass) - math.log(count * (count - 1))


def _class_alignment(unit: Tensor, targets: Tensor) -> float:
    """By the sums of the classes: ``sum_{i,j} |x_i - x_j|^2 = 2 n sum |x_i|^2 - 2 |sum x_i|^2``."""
    _, own = torch.unique(targets, return_inverse=True)
    classes = int(own.max()) + 1
    x = unit.double()
    sums = x.new_zeros(classes, x.shape[1]).index_add_(0, own, x)
    squares = x.new_zeros(classes).index_add_(0, own, x.square().sum(1))
    sizes = own.bincount(minlength=classes).double()
    distances = (2 * sizes * squares - 2 * sums.square().sum(1)).clamp_min(0).sum()
    pairs = (sizes * (sizes - 1)).sum()
    return float(distances / pairs) if pairs > 0 else float("nan")
