"""``eval geometry``: how features lie in their space, and whether they have collapsed."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeInt
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Row
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory.knn import cosines, inverse_norms

_MAX_ELEMENTS = 2**23
_DEAD = 1e-4
"""A dimension is dead if its deviation is below this share of the largest one."""


@torch.no_grad()
def _feature_geometry(features: Tensor, targets: Tensor) -> dict[str, float]:
    """Measures the spread of features, by n^2 D operations.

    Args:
        features: (n, D), n at least 2, finite.
        targets: (n,) classes.

    Returns:
        - ``effective_rank`` of the features as they are, in [1, min(n, D)];
        - ``uniformity``, ``log mean_{i != j} exp(-2 |x_i - x_j|^2)`` of unit rows, at most 0;
        - ``class_alignment``, the mean ``|x_i - x_j|^2`` of unit rows over pairs of the same class,
          in [0, 4]; nan if no class has two rows;
        - ``mean_cosine`` over pairs of rows;
        - ``std``, the mean deviation of the dimensions of unit rows, times ``sqrt(D)``: about 1 for
          an isotropic cloud, 0 for a collapsed one;
        - ``dead``, the percentage of dimensions that hardly vary, and the rows' ``mean_norm``.

    Source:
        Effective rank: Garrido et al., ICML 2023, arXiv 2210.02885. Alignment and uniformity: Wang
        and Isola, ICML 2020, arXiv 2005.10242. Deviation: Chen and He, CVPR 2021, arXiv 2011.10566.
    """
    x = features.float()
    deviations = x.std(dim=0, correction=0)
    unit = F.normalize(x, dim=1)
    count = len(x)
    # |sum_i x_i|^2 counts every pair twice, and every row once with itself.
    pairs = float(unit.double().sum(0).square().sum() - unit.double().square().sum())
    return {
        "effective_rank": float(effective_rank(x)),
        "uniformity": _uniformity(unit),
        "class_alignment": _class_alignment(unit, targets),
        "mean_cosine": pairs / (count * (count - 1)),
        "std": float(unit.std(dim=0, correction=0).mean()) * math.sqrt(x.shape[1]),
        "dead": 100 * float((deviations <= _DEAD * deviations.max()).float().mean()),
        "mean_norm": float(x.norm(dim=1).mean()),
    }


def _uniformity(unit: Tensor) -> float:
    count, scale = len(unit), inverse_norms(unit)
    size = max(1, _MAX_ELEMENTS // count)
    masses = []
    for start in range(0, count, size):
        # Unit rows: -2 |x - y|^2 = 4 x.y - 4.
        potentials = cosines(unit[start : start + size], unit, scale).mul_(4).sub_(4)
        potentials.diagonal(start).fill_(float("-inf"))
        masses.append(potentials.logsumexp(1))
    mass = torch.cat(masses).double().logsumexp(0)
    return float(mass) - math.log(count * (count - 1))


def _class_alignment(unit: Tensor, targets: Tensor) -> float:
    """Uses sums per class: ``sum_{i,j} |x_i - x_j|^2 = 2 n sum |x_i|^2 - 2 |sum x_i|^2``."""
    _, own = torch.unique(targets, return_inverse=True)
    classes = int(own.max()) + 1
    x = unit.double()
    sums = x.new_zeros(classes, x.shape[1]).index_add_(0, own, x)
    squares = x.new_zeros(classes).index_add_(0, own, x.square().sum(1))
    sizes = own.bincount(minlength=classes).double()
    distances = (2 * sizes * squares - 2 * sums.square().sum(1)).clamp_min(0).sum()
    pairs = (sizes * (sizes - 1)).sum()
    return float(distances / pairs) if pairs > 0 else float("nan")


class FeatureSpace(FeatureProtocol):
    """Settings of ``eval geometry``: spread and collapse of the features of a split.

    If there are more than ``samples`` images, that many are drawn by ``seed``.

    >>> rows = torch.eye(6), torch.arange(6) % 2
    >>> (row,) = FeatureSpace().measure(Features(rows, rows, ["cat", "dog"]))
    >>> row["images"], row["dimensions"], row["mean_cosine"]
    (6, 6, 0.0)
    """

    title: ClassVar[str] = "Geometry and collapse"

    split: Literal["train", "test"] = "test"
    samples: Annotated[int, Gt(1)] = 10_000
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row, with ``None`` instead of nan."""
        rows, targets = getattr(features, self.split)
        if len(rows) < 2:
            other = "train" if self.split == "test" else "test"
            raise ConfigError(
                "split",
                self.split,
                "it has one labelled image, and the spread of features needs two",
                f"give more images, or take split={other}",
            )
        if len(rows) > self.samples:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randperm(len(rows), generator=generator)[: self.samples]
            rows, targets = rows[drawn], targets[drawn]
        found = _feature_geometry(rows, targets)
        plain = {k: None if math.isnan(v) else v for k, v in found.items()}
        return [{"images": len(rows), "dimensions": rows.shape[1], **plain}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``effective_rank``, ``uniformity``, ``dead``."""
        return {k: float(rows[0][k]) for k in ("effective_rank", "uniformity", "dead")}
