"""From one normalisation of images to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Renormalize(nn.Module):
    """Images normalised by one mean and deviation, as if normalised by another.

    ``(x std + mean - target_mean) / target_std``; the identity where they are the same.

    Args:
        mean: per channel, that the images were normalised by.
        std: per channel, above 0.
        target_mean: per channel.
        target_std: per channel, above 0.
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        target_mean: Sequence[float],
        target_std: Sequence[float],
    ) -> None:
        super().__init__()
        m, s, tm, ts = (
            torch.tensor(list(v), dtype=torch.float64).view(-1, 1, 1)
            for v in (mean, std, target_mean, target_std)
        )
        same = torch.equal(m, tm) and torch.equal(s, ts)
        self.register_buffer("scale", None if same else (s / ts).float(), persistent=False)
        self.register_buffer("shift", None if same else ((m - tm) / ts).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Converts images.

        Args:
            x: (N, C, H, W).
        """
        return x if self.scale is None or self.shift is None else x * self.scale + self.shift
