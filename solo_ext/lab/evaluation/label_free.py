"""Measures without labels, from several augmented views of each image."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from solo_ext.config.schema import Augmentation, Crop, Seed, View
from solo_ext.core.draws import derive_seed, permutation
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import PositiveFloat, PositiveInt
from solo_ext.data.images import part_of
from solo_ext.data.loaders import FixedLoader
from solo_ext.data.reading import Images
from solo_ext.data.transforms import Transform, pretrain_transform
from solo_ext.data.views import FixedViews
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import extract_features, pooled
from solo_ext.lab.evaluation.protocol import NotHigher, Protocol, Row
from solo_ext.lab.evaluation.scores import gaussian_potential
from solo_ext.losses.alignment import alignment_loss_func, effective_rank
from solo_ext.memory.knn import nearest_neighbors


class Views(Protocol):
    """Settings of ``eval views``: measures without labels, from augmented views of images.

    Attributes:
        samples: most images that are measured; they are drawn with ``seed``.
        k: number of neighbours that two views are compared by, at most a quarter of the images.
        lidar_images: number of these images that LiDAR is measured on.
        lidar_views: views of each of them. The paper has 1,000 images of 50 views.
        delta: added to the variance within images, as in the paper.
        augmentation: the transforms of the views; null: those of the run's own large crops.

    >>> Views(samples=500).lidar_views
    10
    """

    title: ClassVar[str] = "Views without labels"
    needs_labels: ClassVar[bool] = False
    not_higher: ClassVar[NotHigher] = {
        "alpha_req": "neither",
        "alignment": "lower",
        "uniformity": "lower",
    }

    split: Literal["train", "test"] = "test"
    samples: Annotated[int, Ge(2)] = 2000
    k: PositiveInt = 10
    lidar_images: Annotated[int, Ge(2)] = 500
    lidar_views: Annotated[int, Ge(2)] = 10
    delta: PositiveFloat = 1e-4
    augmentation: View | None = None
    seed: Seed = 0

    def depends_on(self, context: EvalContext) -> list[str | None]:
        """The augmentations, which the digest of the weights does not tell."""
        entries = [entry.model_dump() for entry in self._augmentations(context)]
        return [json.dumps(entries, sort_keys=True)]

    def unfit(self, context: EvalContext) -> ConfigError | None:
        try:
            self._augmentations(context)
        except ConfigError as error:
            return error
        return super().unfit(context)

    def run(self, context: EvalContext) -> list[Row]:
        """One row: the numbers of this file's functions on the backbone's features.

        ``rankme`` and ``alpha_req`` are of the first view, ``uniformity`` is the mean over the
        first two. ``k`` is smaller than asked for if there are fewer other images. ``alpha_req`` is
        ``None`` if the features have too few directions.

        Raises:
            ConfigError: fewer than two images, or nothing says how views are augmented.
        """
        images = getattr(context, self.split)
        # Not sorted: LiDAR takes the first, which must not be those of the first classes.
        order = permutation(len(images), derive_seed(self.seed))
        drawn = order(np.arange(min(self.samples, len(images))))
        some, rest = np.split(drawn, [self.lidar_images])
        many = self._features(context, some, self.lidar_views, "views for LiDAR")
        pairs = many[:, :2]
        if len(rest):
            pairs = torch.cat((pairs, self._features(context, rest, 2, "pairs of views")))
        if len(many) < 2:
            problem = f"the {self.split} split has {len(pairs)} images, and this needs two"
            raise ConfigError("split", self.split, problem, "give more images")
        first, second = pairs.unbind(1)
        # Among few images all are neighbours of each other.
        k = max(1, min(self.k, (len(pairs) - 1) // 4))
        alpha = alpha_req(first)
        units = F.normalize(first, dim=1), F.normalize(second, dim=1)
        return [
            {
                "images": len(pairs),
                "dimensions": first.shape[1],
                "rankme": float(effective_rank(first)),
                "alpha_req": None if math.isnan(alpha) else alpha,
                "lidar": lidar(many, self.delta),
                "lidar_images": len(many),
                "lidar_views": self.lidar_views,
                "alignment": float(alignment_loss_func(*units)),
                "uniformity": sum(map(gaussian_potential, units)) / 2,
                "neighbor_overlap": neighbor_overlap(first, second, k),
                "k": k,
            }
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The six measures, without those that are ``None``."""
        names = ("rankme", "alpha_req", "lidar", "alignment", "uniformity", "neighbor_overlap")
        return {name: float(rows[0][name]) for name in names if rows[0][name] is not None}

    def _augmentations(self, context: EvalContext) -> list[Augmentation]:
        """One entry for each large crop of the run, or the one of the settings."""
        crop = context.cfg.augmentations[0]
        if self.augmentation is not None:
            given: list[View] = [self.augmentation]
        else:
            own = [a for a in context.model.cfg.augmentations if isinstance(a, Augmentation)]
            given = [a for a in own if a.crop_size == own[0].crop_size for _ in range(a.num_crops)]
        if not given:
            raise ConfigError(
                "augmentation",
                None,
                f"{context.model.name!r} does not say how its views were augmented",
                "say it, as augmentation.rrc.crop_min_scale=0.2",
            )
        shared = {name: getattr(crop, name) for name in Crop.model_fields}
        return [Augmentation(**{**a.model_dump(), **shared, "num_crops": 1}) for a in given]

    def _features(
        self,
        context: EvalContext,
        places: NDArray[np.int64],
        count: int,
        task: str,
    ) -> Tensor:
        """Features (n, count, D) of views of the images at some places of the split."""
        images, data = getattr(context, self.split), context.cfg.data
        entries = self._augmentations(context)
        transforms = [_first_crop(data.dataset, entry) for entry in entries]
        views = SeveralViews(part_of(images, places), transforms, count, self.seed, places.tolist())
        per_batch = context.settings.batch_size or context.cfg.optimizer.batch_size
        size = max(1, per_batch // count)
        loader = FixedLoader(views, size, data.num_workers, data.start_method)
        backbone = _OfSeveralViews(context.model.backbone)
        report = context.report(task)
        features, _ = extract_features(backbone, loader, device=context.device, progress=report)
        return features.view(len(features), count, -1)


def _first_crop(dataset: str, entry: Augmentation) -> Transform:
    return pretrain_transform(dataset, [entry]).transforms[0]


class SeveralViews(FixedViews):
    """Samples ``(views, target)`` with ``count`` views, drawn by (seed, image, number of the view).

    Args:
        images: as for :class:`~solo_ext.data.views.FixedViews`.
        transforms: view j is made by the j-th of these, and again from the first.
        count: number of views.
        seed: of the draws.
        names: number of each image that its draws depend on.

    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> views, target = SeveralViews(images, [ToTensor()], 2, seed=0, names=range(4))[1]
    >>> views.shape, target
    (torch.Size([2, 3, 8, 8]), 3)
    """

    def __init__(
        self,
        images: Images,
        transforms: Sequence[Transform],
        count: int,
        seed: int,
        names: Sequence[int],
    ) -> None:
        super().__init__(images, transforms[0])
        self.transforms, self.count, self.seed, self.names = transforms, count, seed, names

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return FixedViews(self.images, partial(self._views, self.names[index]))[index]

    def _views(self, name: int, image: Image.Image) -> Tensor:
        found = []
        # Without workers this process may be training, so restore its generator afterwards.
        with torch.random.fork_rng(devices=[]):
            for number in range(self.count):
                torch.default_generator.manual_seed(derive_seed(self.seed, name, number))
                found.append(self.transforms[number % len(self.transforms)](image))
        return torch.stack(found)


class _OfSeveralViews(nn.Module):
    """Features (B, V * D) of views (B, V, 3, H, W)."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, views: Tensor) -> Tensor:
        flat = views.flatten(0, 1)
        return pooled(self.backbone(flat), len(flat)).reshape(len(views), -1)


@torch.no_grad()
def alpha_req(x: Tensor, first: int = 4, last: int = 100) -> float:
    """Decay of the spectrum of features: alpha of the power law ``lambda_j ~ j^-alpha``.

    ``lambda_1 >= lambda_2 >= ...`` are the eigenvalues of the covariance of x. ``-alpha`` is the
    slope of ``log lambda_j`` over ``log j``, fitted by least squares with the weights ``1 / j``
    (Agrawal et al., "alpha-ReQ", NeurIPS 2022). The paper gives no range of j; 4 to 100
    and the weights are those of its code. Eigenvalues below the rounding errors of x are left out.

    Args:
        x: (N, D), of any scale.
        first: the first j.
        last: the last j.

    Returns:
        A number without unit, 0 for an isotropic cloud, larger for a faster decay; the paper finds
        the best networks near 1. NaN if fewer than two eigenvalues are left.

    Example:
        >>> scales = torch.arange(1.0, 65).pow(-0.5)  # standard deviations of 64 directions
        >>> round(alpha_req(torch.cat((scales.diag(), -scales.diag()))), 4)
        1.0
    """
    x = x.double()
    values = torch.linalg.svdvals(x - x.mean(0))
    error = torch.finfo(torch.float32).eps * x.norm()
    values = values[values > error][first - 1 : last]
    if len(values) < 2:
        return math.nan
    rank = torch.arange(first, first + len(values), dtype=x.dtype, device=x.device)
    weights, logs = rank.reciprocal(), rank.log()
    weights = weights / weights.sum()
    # An eigenvalue is the squared singular value, over N.
    heights = 2 * values.log()
    centred = logs - (weights * logs).sum()
    slope = (weights * centred * heights).sum() / (weights * centred.square()).sum()
    return -float(slope)


@torch.no_grad()
def lidar(views: Tensor, delta: float = 1e-4) -> float:
    """Effective rank of the features that tell images apart, as linear discriminants do.

    Each image is a class, and its views are the samples of it. With the mean ``m_i`` of image i,
    the mean ``m`` of all, ``S_b = 1/N sum_i (m_i - m)(m_i - m)^T`` between the images and
    ``S_w = 1/(N V) sum_ij (x_ij - m_i)(x_ij - m_i)^T + delta I`` within them, it is
    ``exp(-sum_k p_k log p_k)`` of the eigenvalues of ``S_w^-1/2 S_b S_w^-1/2``, divided by their
    sum (Eqs. 1 to 4 of Thilak et al., "LiDAR", ICLR 2024, arXiv 2312.04000; ``0 log 0 = 0`` in
    place of an epsilon).

    Args:
        views: (N, V, D), V at least 2.
        delta: above 0; 1e-4 in the paper.

    Returns:
        A number of dimensions in [1, min(N - 1, D)]; 1 for collapsed features.

    Example:
        >>> corners = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
        >>> round(lidar(corners[:, None].expand(4, 2, 2)), 4)
        2.0
    """
    x = views.double()
    means = x.mean(1)
    within, between = (x - means[:, None]).flatten(0, 1), means - means.mean(0)
    if x.shape[2] > len(within):
        # Outside of the span of these rows there is nothing to compare.
        basis = torch.linalg.qr(torch.cat((within, between)).T).Q
        within, between = within @ basis, between @ basis
    scatter = within.T @ within / len(within)
    scatter.diagonal().add_(delta)
    root = torch.linalg.cholesky(scatter)
    # L^-1 S_b L^-T of the Cholesky factor has the eigenvalues of S_w^-1/2 S_b S_w^-1/2.
    whitened = torch.linalg.solve_triangular(root, between.T, upper=False)
    values = torch.linalg.svdvals(whitened).square()
    share = values / values.sum().clamp_min(torch.finfo(x.dtype).tiny)
    return float(torch.special.entr(share).sum().exp())


def neighbor_overlap(x: Tensor, y: Tensor, k: int = 10) -> float:
    """Percentage of the k nearest neighbours that two views of an image have in common.

    ``100 / N sum_i |N(x_i) & N(y_i)| / k``, where ``N(x_i)`` are the k other rows of x with the
    largest cosines to ``x_i``, and ``N(y_i)`` likewise in y. It is the mutual nearest-neighbour
    metric of Huh et al. (ICML 2024, arXiv 2405.07987), there between two networks.

    Args:
        x: (N, D), features of one view.
        y: (N, D), features of another view of the same images.
        k: in [1, N - 1].

    Returns:
        In [0, 100]: about ``100 k / (N - 1)`` for independent views, 100 for equal ones. Equal
        cosines are taken in any order, so the number means nothing for collapsed features.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> neighbor_overlap(x, 3 * x, k=1), neighbor_overlap(x, x[[0, 2, 1, 3]], k=1)
        (100.0, 0.0)
    """
    count = len(x)
    own = torch.arange(count)
    # One number for each pair of rows: isin compares both lists at once.
    first, second = (nearest_neighbors(z, z, k, own)[0] + own[:, None] * count for z in (x, y))
    return 100 * int(torch.isin(first, second).sum()) / first.numel()
