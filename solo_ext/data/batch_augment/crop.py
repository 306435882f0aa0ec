"""Crop, resize and mirror as two batched matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AxisResampler(nn.Module):
    """Matrices that crop, scale and mirror along one axis.

    One per length of a crop is kept; its place shifts it.

    Args:
        matrices: the matrix (size, h) of crops of length h at place h of the list, the last of
            the whole image; ``None`` for a length that never comes.
        mirrored: keep them mirrored too.
    """

    kernels: Tensor

    def __init__(self, matrices: Sequence[Tensor | None], mirrored: bool) -> None:
        super().__init__()
        self.source = len(matrices) - 1
        last = matrices[-1]
        assert last is not None
        kernels = torch.zeros(len(matrices), len(last), 2 * self.source)
        for length, matrix in enumerate(matrices):
            if matrix is not None:
                kernels[length, :, self.source : self.source + length] = matrix
        stacked = torch.stack((kernels, kernels.flip(1)) if mirrored else (kernels,))
        self.register_buffer("kernels", stacked, persistent=False)

    def forward(self, start: Tensor, length: Tensor, flip: Tensor | None = None) -> Tensor:
        """The matrices (N, size, source) of crops.

        Args:
            start: first pixel (N,).
            length: pixels (N,).
            flip: 0 or 1 (N,).
        """
        # All shifts of all matrices without a copy: zeros stand to the left of each.
        shifted = self.kernels.unfold(3, self.source, 1).permute(0, 1, 3, 2, 4)
        mirror = flip if flip is not None and len(shifted) == 2 else torch.zeros_like(start)
        return shifted[mirror, length, self.source - start]


def kernel_bytes(source: int, size: int, mirrored: bool) -> int:
    """Memory of an :class:`AxisResampler`, which grows with the square of the source."""
    return 4 * (1 + mirrored) * (source + 1) * size * 2 * source


def bicubic_matrices(source: int, size: int) -> list[Tensor | None]:
    """Matrices that scale crops of any length up to ``source`` to ``size`` pixels."""
    return [None, *(bicubic_matrix(length, size) for length in range(1, source + 1))]


def central_matrix(source: int, shorter: int, size: int) -> list[Tensor | None]:
    """The matrix of torchvision's ``Resize(size)`` and ``CenterCrop(size)`` along one axis.

    Args:
        source: length of the axis.
        shorter: length of the shorter axis, which becomes ``size``.
        size: side of the crop.
    """
    resized = size * source // shorter
    first = round((resized - size) / 2)
    whole = bicubic_matrix(source, resized)[first : first + size]
    return [*[None] * source, whole]


def bicubic_matrix(length: int, size: int) -> Tensor:
    """The matrix (size, length) that scales ``length`` pixels to ``size`` as PIL does.

    Output pixel o samples around (o + 1/2) length / size with the cubic of a = -1/2 (Keys,
    "Cubic convolution interpolation for digital image processing", 1981), widened by length / size
    where pixels become fewer; weights end at the image's edge and sum to 1.
    """
    scale = length / size
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    distance = torch.arange(length, dtype=torch.float64) + 0.5 - centre[:, None]
    weights = _cubic(distance / max(scale, 1.0))
    return (weights / weights.sum(1, keepdim=True)).float()


def _cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near = (1.5 * x - 2.5) * x**2 + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def resample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Applies a matrix per image to its rows and one to its columns.

    Args:
        images: (N, C, H, W).
        rows: (N, S, H).
        columns: (N, T, W).

    Returns:
        (N, C, S, T).
    """
    n, channels, height, width = images.shape
    across = torch.bmm(images.reshape(n, channels * height, width), columns.transpose(1, 2))
    stacked = across.view(n, channels, height, -1)
    return torch.matmul(rows.unsqueeze(1), stacked)
