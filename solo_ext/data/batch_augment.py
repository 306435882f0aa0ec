"""Augmentation and mixing of a whole batch on the training device."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from solo_ext.config.schema import Augmentation, Mix
from solo_ext.core.draws import sample_keys, uniforms
from solo_ext.data.batch_draws import (
    AFFINE,
    EQUALIZED,
    FLIP,
    GRAY,
    HUE,
    NO_JITTER,
    PLACE,
    RADIUS,
    SOLARIZED,
    Draws,
    draw_view,
)
from solo_ext.data.batch_ops import (
    AxisResampler,
    bicubic_matrices,
    blur,
    central_matrix,
    jitter_,
    mix_channels,
    resample,
    towards_grey,
)
from solo_ext.data.transforms import Statistics, statistics
from solo_ext.data.views import moved_to

LARGEST_FUSED = 96
"""Longest side of images and crops that the Triton kernel takes; beyond it one program would have
to hold too many pixels.
"""

_CACHED_BYTES = 1 << 20
"""Bytes of crops per chunk on the CPU: several such arrays fit in its cache."""

_MIX_FIRST, _MIX_PER_VIEW, _MIX_DRAWS = 1 << 32, 8, 5
"""Mixing begins at number 2**32 of a sample's stream; each view reserves 8 numbers and uses 5."""


class BatchAugment(nn.Module):
    """Makes all crops of a batch of uint8 images, in the order of the config's ``augmentations``.

    Distributions are those of :func:`solo_ext.data.transforms.pretrain_transform`, without
    rounding to 8 bits between steps. :meth:`draw` draws all parameters on the CPU, from (seed,
    epoch, index) alone; :meth:`forward` computes on the images' device. On a GPU a Triton kernel
    makes each view of small images (:data:`LARGEST_FUSED`) in one launch. Elsewhere the crops are
    products of matrices, whose memory grows with the square of the images' side.

    >>> pipeline = Augmentation(crop_size=8, num_crops=2)
    >>> augment = BatchAugment("custom", [pipeline], height=12, width=12, seed=5)
    >>> draws = augment.draw(epoch=0, indices=np.arange(4))
    >>> views = augment(torch.zeros(4, 3, 12, 12, dtype=torch.uint8), draws)
    >>> [tuple(view.shape) for view in views]
    [(4, 3, 8, 8), (4, 3, 8, 8)]
    """

    def __init__(
        self,
        dataset: str,
        augmentations: Sequence[Augmentation],
        height: int,
        width: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.augmentations, self.seed = augmentations, seed
        self.height, self.width = height, width
        self.makers = nn.ModuleList(
            _ViewMaker(a, statistics(dataset, a), height, width) for a in augmentations
        )

    def draw(self, epoch: int, indices: NDArray[np.int64]) -> Draws:
        """Draws the parameters of some samples (N,): (V, N, COLUMNS) for V crops."""
        keys = sample_keys(self.seed, epoch, indices)
        drawn = [
            draw_view(maker.augmentation, keys, number, self.height, self.width)
            for number, maker in enumerate(self._views())
        ]
        return np.stack(drawn)

    def forward(self, images: Tensor, draws: Draws) -> list[Tensor]:
        """Normalised crops (N, 3, S, S) of uint8 images (N, 3, H, W), with :meth:`draw`'s draws."""
        fused = [maker.has_fused(images) for maker in self._views()]
        moved = moved_to(draws, images.device) if any(fused) else [None] * len(draws)
        return [
            maker.plain(images, drawn) if there is None or not one else maker.fused(images, there)
            for maker, drawn, there, one in zip(self._views(), draws, moved, fused, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"from {self.height} x {self.width}, seed {self.seed}"

    def _views(self) -> Iterator[_ViewMaker]:
        """Yields the module that makes each crop, in the order of the crops."""
        for augmentation, maker in zip(self.augmentations, self.makers, strict=True):
            yield from itertools.repeat(cast(_ViewMaker, maker), augmentation.num_crops)


class _ViewMaker(nn.Module):
    """Makes the crops of one entry of ``augmentations``, from images of ``height`` x ``width``."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, augmentation: Augmentation, normal: Statistics, height: int, width: int
    ) -> None:
        super().__init__()
        self.size, self.augmentation = augmentation.crop_size, augmentation
        for name, values in zip(("mean", "std"), normal, strict=True):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        mirrored = augmentation.horizontal_flip.prob > 0
        rows, columns = (
            bicubic_matrices(source, self.size)
            if augmentation.rrc.enabled
            else central_matrix(source, min(height, width), self.size)
            for source in (height, width)
        )
        self.rows = AxisResampler(rows, mirrored=False)
        self.columns = AxisResampler(columns, mirrored=mirrored)
        self._chunk = max(16, _CACHED_BYTES // (12 * self.size**2))

    def extra_repr(self) -> str:
        return str(self.augmentation)

    def has_fused(self, images: Tensor) -> bool:
        """Whether the Triton kernel makes this view."""
        small = max(*images.shape[2:], self.size) <= LARGEST_FUSED
        return small and not self.augmentation.equalization.prob and _has_triton(images)

    def fused(self, images: Tensor, draws: Tensor) -> Tensor:
        """The view by one kernel, from draws (N, COLUMNS) on the images' device."""
        from solo_ext.data.fused_crops import fused_crops

        given = self.augmentation
        resized = None
        if not given.rrc.enabled:
            shorter = min(images.shape[2:])
            resized = [self.size * side // shorter for side in images.shape[2:]]
        jitter = given.color_jitter
        views = fused_crops(
            *(images, draws, self.mean, self.std, self.size, resized),
            jitter=bool(jitter.prob),
            hue=bool(jitter.prob and jitter.hue),
            blur=bool(given.gaussian_blur.prob),
        )
        return cast(Tensor, views)

    def plain(self, images: Tensor, draws: Draws) -> Tensor:
        """The view by torch's operations, from draws (N, COLUMNS) on the CPU."""
        n = len(images)
        shape = (n, 3, self.size, self.size)
        views = torch.empty(shape, dtype=torch.float32, device=images.device)
        # Images whose hue is shifted at the same position of their jitter form one slice.
        order = np.argsort(draws[:, PLACE], kind="stable")
        # Chunks help a CPU's cache; on a GPU they would only add kernel launches.
        step = self._chunk if images.device.type == "cpu" else n
        for start in range(0, n, step):
            some = order[start : start + step]
            rows = moved_to(some, images.device)
            views.index_copy_(0, rows, self._rows(images.index_select(0, rows), draws[some]))
        return views

    def _rows(self, images: Tensor, drawn: Draws) -> Tensor:
        moved = moved_to(drawn, images.device)
        top, left, height, width, flip = moved[:, : FLIP + 1].long().unbind(1)
        rows = self.rows(top, height) / 255
        columns = self.columns(left, width, flip)
        # Bicubic interpolation overshoots: clip, as is done for 8-bit images.
        x = resample(images.float(), rows, columns).clamp_(0, 1)
        jitter = self.augmentation.color_jitter
        steps = sum(map(bool, jitter.strengths[:3]))
        stops = np.searchsorted(drawn[:, PLACE], [*range(steps + 1), NO_JITTER]).tolist()
        affine = moved[:, AFFINE : AFFINE + 3 * steps].reshape(len(x), steps, 3)
        jitter_(x, affine, moved[:, HUE] if jitter.hue else None, stops)
        grey = towards_grey(1 - moved[:, GRAY], moved[:, GRAY])
        # Grey is linear in the channels, so it can share one product with the normalisation,
        # unless a non-linear step comes between them.
        early = self.augmentation.solarization.prob or self.augmentation.equalization.prob
        if early:
            x = mix_channels(x, grey, torch.zeros(1, 1, device=x.device))
        radius = drawn[:, RADIUS]
        x = _changed(x, radius, lambda part: blur(part, moved_to(radius[radius > 0], x.device)))
        # Solarising inverts values from 128 of 255 on: the result is the smaller of x and 1 - x.
        x = _changed(x, drawn[:, SOLARIZED], lambda part: torch.minimum(part, 1 - part))
        x = _changed(x, drawn[:, EQUALIZED], _equalized)
        scale = torch.diag_embed(1 / self.std)
        last = scale.expand(len(x), 3, 3) if early else scale @ grey
        return mix_channels(x, last, -self.mean / self.std)


def _has_triton(images: Tensor) -> bool:
    return images.is_cuda and importlib.util.find_spec("triton") is not None


def _changed(x: Tensor, where: NDArray[Any], change: Callable[[Tensor], Tensor]) -> Tensor:
    chosen = np.flatnonzero(where)
    if not len(chosen):
        return x
    rows = moved_to(chosen, x.device)
    return x.index_copy_(0, rows, change(x.index_select(0, rows)))


def _equalized(x: Tensor) -> Tensor:
    pixels = (x * 255).round_().to(torch.uint8)
    return cast(Tensor, F.equalize_image(pixels)).float() / 255


def _floats(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


class MixDraws(NamedTuple):
    """Random parameters of mixing one view of N images.

    >>> draws = ViewMixer(Mix(name="mixup"), seed=5).draw(epoch=0, indices=np.arange(4), views=2)
    >>> draws[0].centre.shape
    torch.Size([4, 2])
    """

    partner: Tensor  # (N,) the image that each one is mixed with
    share: Tensor  # (N,) weight or area of the view itself; 1 if it is not mixed
    centre: Tensor  # (N, 2) centre of CutMix's box, as shares of height and width


class ViewMixer:
    """Mixes each view of an image with the same view of another image of the batch.

    Mixup as noise (after Verma et al., "Towards domain-agnostic contrastive learning", ICML 2021,
    arXiv 2011.04419): ``s x + (1 - s) x'`` with s uniform in [``min_share``, 1], drawn for every
    image and view; target and index stay those of x. CutMix (Yun et al., ICCV 2019, arXiv
    1905.04899) pastes a box of area 1 - s instead, cropped at the edge.

    Everything except the choice of x' is a function of (seed, epoch, index). x' is the next image
    in an order drawn from these: it depends on which images the batch has, not on their order.

    >>> mixer = ViewMixer(Mix(name="mixup"), seed=5)
    >>> draws = mixer.draw(epoch=0, indices=np.arange(4), views=2)
    >>> [view.shape for view in mixer([torch.ones(4, 3, 8, 8)] * 2, draws)]
    [torch.Size([4, 3, 8, 8]), torch.Size([4, 3, 8, 8])]
    """

    def __init__(self, settings: Mix, seed: int) -> None:
        self.settings, self.seed = settings, seed

    def draw(self, epoch: int, indices: NDArray[np.int64], views: int) -> list[MixDraws]:
        """Draws the parameters of some samples (N,), one entry per view."""
        keys = sample_keys(self.seed, epoch, indices)
        low = self.settings.min_share
        drawn = []
        for view in range(views):
            chance, share, place, *centre = uniforms(
                keys, _MIX_FIRST + view * _MIX_PER_VIEW, _MIX_DRAWS
            ).T
            order = np.argsort(place)
            partner = np.empty_like(order)
            partner[order] = np.roll(order, -1)
            kept = np.where(chance < self.settings.prob, low + (1 - low) * share, 1.0)
            drawn.append(
                MixDraws(torch.from_numpy(partner), _floats(kept), _floats(np.stack(centre, 1)))
            )
        return drawn

    def __call__(self, views: Sequence[Tensor], draws: Sequence[MixDraws]) -> list[Tensor]:
        """The mixed views (N, 3, S, S), in new tensors."""
        mix = _mixup if self.settings.name == "mixup" else _cutmix
        return [mix(view, drawn) for view, drawn in zip(views, draws, strict=True)]


def _mixup(view: Tensor, drawn: MixDraws) -> Tensor:
    """``s x + (1 - s) x'``."""
    share = drawn.share.view(-1, 1, 1, 1).to(view.dtype)
    return torch.lerp(view[drawn.partner], view, share)


def _cutmix(view: Tensor, drawn: MixDraws) -> Tensor:
    """Pastes a box of the other image, whose sides are ``sqrt(1 - s)`` of the view's."""
    inside = [
        _near(length, centre, drawn.share)
        for length, centre in zip(view.shape[-2:], drawn.centre.unbind(1), strict=True)
    ]
    box = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
    return torch.where(box.unsqueeze(1), view[drawn.partner], view)


def _near(length: int, centre: Tensor, share: Tensor) -> Tensor:
    """Which pixels of an axis the box covers (N, length); its side is rounded down."""
    side = (length * (1 - share).sqrt()).floor().unsqueeze(1)
    first = (centre * length).floor().unsqueeze(1) - (side / 2).floor()
    place = torch.arange(length, device=centre.device)
    return (place >= first) & (place < first + side)
