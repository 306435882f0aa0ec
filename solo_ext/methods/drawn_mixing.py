"""Which negatives are mixed, drawn at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.draws import mix
from solo_ext.losses.mochi import Mixing, draw_mixes


class DrawnMixing:
    """Draws MoCHi's mixtures anew at every step and rank, and the same again when it is resumed.

    Args:
        settings: :class:`solo_ext.methods.contrastive_kwargs.MixingKwargs`.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._state = 0

    def active(self, epoch: int) -> bool:
        """Whether negatives are mixed in an epoch."""
        some = self._settings.num_pair_mixes + self._settings.num_query_mixes > 0
        return bool(some and epoch >= self._settings.warmup_epochs)

    def begin(self, seed: int, epoch: int, batch_idx: int) -> None:
        """Starts the draws of a step of the run with this seed."""
        self._state = mix(seed, distributed.rank(), epoch, batch_idx)

    def draw(self, epoch: int, available: int, anchors: Tensor) -> Mixing | None:
        """Draws for each anchor; ``None`` where nothing is mixed.

        Args:
            epoch: current one.
            available: negatives of an anchor.
            anchors: (N, D).
        """
        if not self.active(epoch):
            return None
        settings = self._settings
        counts = settings.num_pair_mixes, settings.num_query_mixes
        generator = None
        if anchors.device.type != "meta":
            self._state = mix(self._state)
            generator = torch.Generator(anchors.device).manual_seed(self._state)
        # A batch may have fewer than were asked for.
        mined = max(min(settings.num_hard, available), 1)
        return Mixing(mined, draw_mixes(anchors, mined, *counts, generator), ranked=False)
