"""Augmentation and mixing of a whole batch on the training device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from solo_ext.config.schema import Augmentation, ColorJitter, Mix
from solo_ext.core.draws import Floats, Keys, sample_keys, uniforms
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
from solo_ext.data.transforms import BLUR_RADIUS, Statistics, statistics

_CACHED_BYTES = 1 << 20
"""Bytes of crops per chunk on the CPU: several such arrays fit in its cache."""

_TRIES = 10
_RATIO = (3 / 4, 4 / 3)
_CONTRAST, _SATURATION, _HUE = 1, 2, 3
_ORDERS = np.array(list(itertools.permutations(range(4))))

_CHANCES = ("color_jitter", "grayscale", "gaussian_blur", "solarization", "equalization")
_BOX, _ORDER, _RADIUS, _FLIP, _APPLIED = 2 * _TRIES + 2, 22, 27, 28, 29
_PER_VIEW = 64
"""Each view reserves 64 numbers of a sample's random stream and uses 34: 22 for the crop box, one
for the order of the jitter, 4 for its factors, one each for blur and flip, and 5 for ``_CHANCES``.
"""
_MIX_FIRST, _MIX_PER_VIEW, _MIX_DRAWS = 1 << 32, 8, 5
"""Mixing begins at number 2**32 of a sample's stream; each view reserves 8 numbers and uses 5."""


class ViewDraws(NamedTuple):
    """Random parameters of one view of N images, on the CPU until the batch is moved.

    Rows are sorted: jittered images come first, by the position of the hue step in their jitter, so
    that images with hue at the same position form one slice. ``affine`` has, for each other step in
    the image's order, the weights of the image, its grey version and the mean of the grey version.

    >>> keys = sample_keys(5, 0, np.arange(4))
    >>> draws = draw_view(Augmentation(crop_size=8, num_crops=2), keys, 0, height=12, width=12)
    >>> draws.part(0, 3).flip.shape
    torch.Size([3])
    """

    rows: Tensor  # (N,) index in the batch of each row's image
    box: Tensor  # (N, 4) top, left, height and width of the crop
    flip: Tensor  # (N,) 0 or 1
    affine: Tensor  # (N, steps, 3)
    hue: Tensor | None  # (N,) shift in turns
    hue_stops: tuple[int, ...]  # first row of each hue position, then of rows without jitter
    gray: Tensor  # (N,) 0 or 1
    blurred: Tensor  # indices of rows, ascending; likewise solarized and equalized
    radius: Tensor  # blur radius of each blurred row, in pixels
    solarized: Tensor
    equalized: Tensor

    def part(self, start: int, stop: int) -> ViewDraws:
        """Slices rows ``start`` to ``stop``; reads values, so the tensors must be on the CPU."""
        inside = [
            slice(*np.searchsorted(rows.numpy(), (start, stop)))
            for rows in (self.blurred, self.solarized, self.equalized)
        ]
        return ViewDraws(
            self.rows[start:stop],
            self.box[start:stop],
            self.flip[start:stop],
            self.affine[start:stop],
            None if self.hue is None else self.hue[start:stop],
            tuple(min(max(s, start), stop) - start for s in self.hue_stops),
            self.gray[start:stop],
            self.blurred[inside[0]] - start,
            self.radius[inside[0]],
            self.solarized[inside[1]] - start,
            self.equalized[inside[2]] - start,
        )


def draw_view(
    augmentation: Augmentation, keys: Keys, number: int, height: int, width: int
) -> ViewDraws:
    """Draws the parameters of view ``number`` of the samples with ``keys`` (N,).

    >>> keys = sample_keys(5, 0, np.arange(4))
    >>> draws = draw_view(Augmentation(crop_size=8, num_crops=2), keys, 0, height=12, width=12)
    >>> draws.box.shape
    torch.Size([4, 4])
    """
    draws = uniforms(keys, number * _PER_VIEW, _APPLIED + len(_CHANCES))
    applied = {
        name: draws[:, _APPLIED + place] < getattr(augmentation, name).prob
        for place, name in enumerate(_CHANCES)
    }
    jitter = augmentation.color_jitter
    affine, hue, place = _jitter(jitter, draws[:, _ORDER:_RADIUS], draws[:, _ORDER])
    unjittered = affine.shape[1] + 1
    group = np.where(applied["color_jitter"], place, unjittered)
    rows = np.argsort(group, kind="stable")
    stops = np.searchsorted(group[rows], np.arange(unjittered + 1))
    rrc = augmentation.rrc
    if rrc.enabled:
        scale = (rrc.crop_min_scale, rrc.crop_max_scale)
        box = crop_boxes(draws[:, :_BOX], height, width, scale)
    else:
        box = np.tile(np.array((0, 0, height, width)), (len(keys), 1))
    blurred = np.flatnonzero(applied["gaussian_blur"][rows])
    low, high = BLUR_RADIUS
    radius = low + (high - low) * draws[rows[blurred], _RADIUS]
    flip = draws[:, _FLIP] < augmentation.horizontal_flip.prob
    return ViewDraws(
        torch.from_numpy(rows),
        torch.from_numpy(box[rows]),
        torch.from_numpy(flip[rows].astype(np.int64)),
        _floats(affine[rows]),
        _floats(hue[rows]) if jitter.hue else None,
        tuple(stops.tolist()),
        _floats(applied["grayscale"][rows]),
        torch.from_numpy(blurred),
        _floats(radius),
        torch.from_numpy(np.flatnonzero(applied["solarization"][rows])),
        torch.from_numpy(np.flatnonzero(applied["equalization"][rows])),
    )


def _jitter(
    jitter: ColorJitter, draws: Floats, order: Floats
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """``affine`` (N, steps, 3) of the steps except hue, hue shift (N,), position of hue (N,)."""
    strengths = np.array(jitter.strengths)
    low = np.where(np.arange(4) == _HUE, -strengths, np.maximum(0, 1 - strengths))
    high = np.where(np.arange(4) == _HUE, strengths, 1 + strengths)
    factors = low + (high - low) * draws[:, 1:5]
    # A strength of 0 drops its step; the orders of the other steps stay equally likely.
    steps = [[s for s in o if s != _HUE and strengths[s]] for o in _ORDERS.tolist()]
    before = [sum(bool(strengths[s]) for s in o[: o.index(_HUE)]) for o in _ORDERS.tolist()]
    chosen = (order * len(_ORDERS)).astype(np.int64)
    step = np.array(steps, dtype=np.int64)[chosen]
    factor = np.take_along_axis(factors, step, 1)
    weights = (factor, (1 - factor) * (step == _SATURATION), (1 - factor) * (step == _CONTRAST))
    place = np.array(before)[chosen] if strengths[_HUE] else np.zeros(len(order), np.int64)
    return np.stack(weights, 2), factors[:, _HUE], place


def _floats(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def crop_boxes(
    draws: Floats, height: int, width: int, scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes (N, 4), top, left, height and width, as ``RandomResizedCrop.get_params`` draws them.

    The area is uniform in ``scale``, the ratio log-uniform from 3/4 to 4/3, and sides are rounded;
    the first of ten tries that fits is taken, else the largest centred box of such a ratio.
    ``draws`` (N, 22) are uniform.

    >>> crop_boxes(np.full((1, 22), 0.5), height=32, width=32, scale=(0.25, 0.25))
    array([[ 8,  8, 16, 16]])
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :_TRIES])
    low, high = (math.log(r) for r in _RATIO)
    ratio = np.exp(low + (high - low) * draws[:, _TRIES : 2 * _TRIES])
    # `rint` rounds halves to even, like Python's `round`.
    widths = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    heights = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.argmax(1)
    rows = np.arange(len(draws))
    h, w = heights[rows, first], widths[rows, first]
    top = (draws[:, -2] * (height - h + 1)).astype(np.int64)
    left = (draws[:, -1] * (width - w + 1)).astype(np.int64)
    found = np.stack((top, left, h, w), 1)
    return np.where(fits[rows, first, None], found, np.array(_central(height, width)))


def _central(height: int, width: int) -> tuple[int, int, int, int]:
    ratio = width / height
    if ratio < _RATIO[0]:
        h, w = round(width / _RATIO[0]), width
    elif ratio > _RATIO[1]:
        h, w = height, round(height * _RATIO[1])
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


class BatchAugment(nn.Module):
    """Makes all crops of a batch of uint8 images, in the order of the config's ``augmentations``.

    Distributions are those of :func:`solo_ext.data.transforms.pretrain_transform`, without
    rounding to 8 bits between steps. :meth:`draw` draws all parameters on the CPU, from (seed,
    epoch, index) alone; :meth:`forward` computes on the images' device. The memory of the matrices
    for resampling grows with the square of the images' side.

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

    def draw(self, epoch: int, indices: NDArray[np.int64]) -> list[ViewDraws]:
        """Draws the parameters of some samples (N,), one entry per crop."""
        keys = sample_keys(self.seed, epoch, indices)
        return [
            draw_view(maker.augmentation, keys, number, self.height, self.width)
            for number, maker in enumerate(self._views())
        ]

    def forward(self, images: Tensor, draws: Sequence[ViewDraws]) -> list[Tensor]:
        """Normalised crops (N, 3, S, S) of uint8 images (N, 3, H, W), with :meth:`draw`'s draws."""
        return [maker(images, drawn) for maker, drawn in zip(self._views(), draws, strict=True)]

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

    def forward(self, images: Tensor, draws: ViewDraws) -> Tensor:
        n = len(images)
        shape = (n, 3, self.size, self.size)
        views = torch.empty(shape, dtype=torch.float32, device=images.device)
        # Chunks help a CPU's cache; on a GPU they would only add kernel launches.
        step = self._chunk if images.device.type == "cpu" else n
        for start in range(0, n, step):
            drawn = draws if step >= n else draws.part(start, min(start + step, n))
            views.index_copy_(0, drawn.rows, self._rows(images.index_select(0, drawn.rows), drawn))
        return views

    def _rows(self, images: Tensor, drawn: ViewDraws) -> Tensor:
        top, left, height, width = drawn.box.unbind(1)
        rows = self.rows(top, height) / 255
        columns = self.columns(left, width, drawn.flip)
        # Bicubic interpolation overshoots: clip, as is done for 8-bit images.
        x = resample(images.float(), rows, columns).clamp_(0, 1)
        jitter_(x, drawn.affine, drawn.hue, drawn.hue_stops)
        grey = towards_grey(1 - drawn.gray, drawn.gray)
        # Grey is linear in the channels, so it can share one product with the normalisation,
        # unless a non-linear step comes between them.
        early = self.augmentation.solarization.prob or self.augmentation.equalization.prob
        if early:
            x = mix_channels(x, grey, torch.zeros(1, 1, device=x.device))
        x = _changed(x, drawn.blurred, lambda part: blur(part, drawn.radius))
        # Solarising inverts values from 128 of 255 on: the result is the smaller of x and 1 - x.
        x = _changed(x, drawn.solarized, lambda part: torch.minimum(part, 1 - part))
        x = _changed(x, drawn.equalized, _equalized)
        scale = torch.diag_embed(1 / self.std)
        last = scale.expand(len(x), 3, 3) if early else scale @ grey
        return mix_channels(x, last, -self.mean / self.std)


def _changed(x: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return x.index_copy_(0, rows, change(x.index_select(0, rows))) if len(rows) else x


def _equalized(x: Tensor) -> Tensor:
    pixels = (x * 255).round_().to(torch.uint8)
    return cast(Tensor, F.equalize_image(pixels)).float() / 255


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
