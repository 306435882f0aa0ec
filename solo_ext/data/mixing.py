"""Mixup and CutMix of views; a mixed view keeps its sample's index and target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solo_ext.config.schema import Mix
from solo_ext.core.draws import sample_keys, uniforms

_FIRST, _PER_VIEW, _DRAWS = 1 << 32, 8, 5
"""Mixing takes 5 numbers per view from position 2**32 of a sample's stream; augmentation takes the
first ones."""


class MixDraws(NamedTuple):
    """Random parameters of mixing one view of N images.

    >>> draws = ViewMixer(Mix(name="mixup"), seed=5).draw(epoch=0, indices=np.arange(4), views=2)
    >>> draws[0].partner.shape, draws[0].share.shape, draws[0].centre.shape
    (torch.Size([4]), torch.Size([4]), torch.Size([4, 2]))
    """

    partner: Tensor  # (N,) the image that each one is mixed with
    share: Tensor  # (N,) the share of its own that it keeps, 1 if it is left alone
    centre: Tensor  # (N, 2) of CutMix's box, as shares of height and width


class ViewMixer:
    """Mixes each view of an image with the same view of another image of the batch.

    Mixup as noise (after Verma et al., "Towards domain-agnostic contrastive learning", ICML 2021,
    arXiv 2011.04419): ``s x + (1 - s) x'`` with s uniform in [``min_share``, 1], drawn for every
    image and view; target and index stay those of x. CutMix (Yun et al., ICCV 2019, arXiv
    1905.04899) pastes a box of area 1 - s instead, cropped at the edge.

    Everything except the choice of x' is a function of (seed, epoch, index). x' is the next image
    in an order drawn from them, so it depends on which images the batch has, not on their order.

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
            chance, share, place, *centre = uniforms(keys, _FIRST + view * _PER_VIEW, _DRAWS).T
            order = np.argsort(place)
            partner = np.empty_like(order)
            partner[order] = np.roll(order, -1)
            kept = np.where(chance < self.settings.prob, low + (1 - low) * share, 1.0)
            drawn.append(
                MixDraws(
                    torch.from_numpy(partner),
                    torch.from_numpy(kept.astype(np.float32)),
                    torch.from_numpy(np.stack(centre, 1).astype(np.float32)),
                )
            )
        return drawn

    def __call__(self, views: Sequence[Tensor], draws: Sequence[MixDraws]) -> list[Tensor]:
        """The mixed views (N, 3, S, S), in new tensors."""
        mix = mixup if self.settings.name == "mixup" else cutmix
        return [mix(view, drawn) for view, drawn in zip(views, draws, strict=True)]


def mixup(view: Tensor, drawn: MixDraws) -> Tensor:
    """``s x + (1 - s) x'``.

    >>> drawn = MixDraws(torch.tensor([1, 0]), torch.tensor([0.75, 1.0]), torch.zeros(2, 2))
    >>> mixup(torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 4, 4), drawn)[:, 0, 0, 0]
    tensor([0.2500, 1.0000])
    """
    share = drawn.share.view(-1, 1, 1, 1).to(view.dtype)
    return torch.lerp(view[drawn.partner], view, share)


def cutmix(view: Tensor, drawn: MixDraws) -> Tensor:
    """Pastes a box of sides ``sqrt(1 - s)`` of the other image.

    >>> drawn = MixDraws(torch.tensor([1, 0]), torch.tensor([0.75, 1.0]), torch.full((2, 2), 0.5))
    >>> cutmix(torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 4, 4), drawn)[:, 0].mean((1, 2))
    tensor([0.2500, 1.0000])
    """
    inside = [
        _near(length, centre, drawn.share)
        for length, centre in zip(view.shape[-2:], drawn.centre.unbind(1), strict=True)
    ]
    box = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
    return torch.where(box.unsqueeze(1), view[drawn.partner], view)


def _near(length: int, centre: Tensor, share: Tensor) -> Tensor:
    """Which pixels of an axis the box covers (N, length); sides are rounded down."""
    side = (length * (1 - share).sqrt()).floor().unsqueeze(1)
    first = (centre * length).floor().unsqueeze(1) - (side / 2).floor()
    place = torch.arange(length, device=centre.device)
    return (place >= first) & (place < first + side)
