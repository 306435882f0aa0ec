"""Crop, blur and colour of a batch as matrix products, with separate parameters per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as in PIL."""

_NO_CHROMA = 1e-12


class AxisResampler(nn.Module):
    """Matrices that crop, scale and mirror along one axis.

    ``matrices[h]`` is the matrix (size, h) for crops of length h, or ``None``; the last one is for
    the whole image. :meth:`forward` shifts the columns to where each crop begins.

    >>> crop = AxisResampler(bicubic_matrices(source=8, size=4), mirrored=False)
    >>> crop(start=torch.tensor([2]), length=torch.tensor([5])).shape
    torch.Size([1, 4, 8])
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
        """Matrices (N, size, source) of crops, from their first pixels, lengths and flips (N,)."""
        # The kernels are padded with zeros, so `unfold` gives every shift without a copy.
        shifted = self.kernels.unfold(3, self.source, 1).permute(0, 1, 3, 2, 4)
        mirror = flip if flip is not None and len(shifted) == 2 else torch.zeros_like(start)
        return shifted[mirror, length, self.source - start]


def bicubic_matrices(source: int, size: int) -> list[Tensor | None]:
    """Matrices that scale crops of any length up to ``source`` to ``size`` pixels.

    >>> [None if m is None else tuple(m.shape) for m in bicubic_matrices(source=3, size=2)]
    [None, (2, 1), (2, 2), (2, 3)]
    """
    return [None, *(_bicubic_matrix(length, size) for length in range(1, source + 1))]


def central_matrix(source: int, shorter: int, size: int) -> list[Tensor | None]:
    """The matrix of torchvision's ``Resize(size)`` and ``CenterCrop(size)`` along one axis.

    >>> central_matrix(source=4, shorter=4, size=2)[-1].shape
    torch.Size([2, 4])
    """
    resized = size * source // shorter
    first = round((resized - size) / 2)
    whole = _bicubic_matrix(source, resized)[first : first + size]
    return [*[None] * source, whole]


def _bicubic_matrix(length: int, size: int) -> Tensor:
    """The matrix (size, length) that scales ``length`` pixels to ``size`` like PIL.

    Output pixel o samples around (o + 1/2) length / size with the cubic kernel of a = -1/2 (Keys,
    "Cubic convolution interpolation for digital image processing", 1981), widened by length / size
    when scaling down; weights outside the image are dropped, and the rest sum to 1.
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
    """Multiplies images (N, C, H, W) by rows (N, S, H) and columns (N, T, W), to (N, C, S, T).

    >>> resample(torch.rand(5, 3, 8, 6), torch.rand(5, 4, 8), torch.rand(5, 2, 6)).shape
    torch.Size([5, 3, 4, 2])
    """
    n, channels, height, width = images.shape
    across = torch.bmm(images.reshape(n, channels * height, width), columns.transpose(1, 2))
    stacked = across.view(n, channels, height, -1)
    return torch.matmul(rows.unsqueeze(1), stacked)


def blur(images: Tensor, radius: Tensor) -> Tensor:
    """Blurs every image (N, C, H, W) with its own radius (N,), the standard deviation in pixels.

    >>> blur(torch.rand(5, 3, 8, 8), radius=torch.full((5,), 1.5)).shape
    torch.Size([5, 3, 8, 8])
    """
    height, width = images.shape[-2:]
    rows = _blur_matrices(radius, height)
    return resample(images, rows, rows if height == width else _blur_matrices(radius, width))


def _blur_matrices(radius: Tensor, size: int) -> Tensor:
    """PIL's ``GaussianBlur`` along one axis, as matrices (N, size, size).

    It is three box blurs whose variances add up to that of the Gaussian; the boxes have fractional
    weights at both ends (Gwosdek et al., "Theoretical foundations of Gaussian convolution by
    extended box filtering", SSVM 2011). The edge pixels are repeated.
    """
    box = _boxes(_box_radius(radius), size)
    return box @ box @ box


def _box_radius(radius: Tensor) -> Tensor:
    variance = radius**2 / 3
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    end = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    return whole + end / (6 * (variance - (whole + 1) ** 2))


def _boxes(radius: Tensor, size: int) -> Tensor:
    """Box filters of half-width ``radius`` (N,); weight beyond an edge goes to the edge pixel."""
    radius = radius.view(-1, 1, 1)
    place = torch.arange(size, device=radius.device, dtype=radius.dtype)
    # Seen from pixel p, pixel q covers q - p - 1/2 to q - p + 1/2, which are exact; the edge pixels
    # also cover everything beyond the edge.
    offset, far = place - place[:, None], torch.full_like(place, 4.0 * size)
    upper = torch.where(place == size - 1, far, offset + 0.5)
    lower = torch.where(place == 0, -far, offset - 0.5)
    covered = torch.minimum(upper, radius + 0.5) - torch.maximum(lower, -radius - 0.5)
    return covered.clamp_min(0) / (2 * radius + 1)


def jitter_(images: Tensor, affine: Tensor, hue: Tensor | None, stops: Sequence[int]) -> Tensor:
    """Jitters brightness, contrast, saturation and hue in each image's order, and clamps each time.

    The first three are ``clamp(a x + b grey(x) + c mean(grey(x)), 0, 1)`` with the weights
    ``affine`` (N, steps, 3) of torchvision's ``adjust_*``; ``hue`` (N,) is a shift in turns. Images
    (N, 3, H, W) in [0, 1] are changed in place: rows ``stops[p]`` to ``stops[p + 1]`` get their hue
    shift after p other steps, and rows from the last stop on get no jitter.

    >>> half = torch.tensor([[[0.5, 0.0, 0.0]]])
    >>> jitter_(torch.ones(1, 3, 2, 2), half, hue=None, stops=(0, 0, 1)).amax()
    tensor(0.5000)
    """
    jittered = images[: stops[-1]]
    steps = affine.shape[1]
    for step in range(steps + 1):
        start, stop = stops[step], stops[step + 1]
        if hue is not None and stop > start:
            shift_hue_(images[start:stop], hue[start:stop])
        if step < steps and len(jittered):
            _affine_(jittered, *affine[: len(jittered), step].unbind(1))
    return images


def mix_channels(images: Tensor, matrices: Tensor, bias: Tensor) -> Tensor:
    """``matrix @ pixel + bias`` for every pixel, with matrices (N, 3, 3).

    >>> swap = torch.eye(3).flip(0).expand(5, 3, 3)
    >>> mix_channels(torch.rand(5, 3, 8, 8), swap, torch.zeros(3)).shape
    torch.Size([5, 3, 8, 8])
    """
    flat = images.flatten(2)
    return torch.baddbmm(bias.unsqueeze(-1), matrices, flat).view_as(images)


def towards_grey(keep: Tensor, grey: Tensor) -> Tensor:
    """Matrices (N, 3, 3) that compute ``keep x + grey * grey(x)``, from weights (N,).

    >>> towards_grey(keep=torch.zeros(1), grey=torch.ones(1))[0, 0]
    tensor([0.2990, 0.5870, 0.1140])
    """
    row = torch.stack([grey * weight for weight in GREY], 1)
    return torch.diag_embed(keep.unsqueeze(1).expand(-1, 3)) + row.unsqueeze(1)


def shift_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Shifts the hue in HSV and keeps saturation and value, like torchvision's ``adjust_hue``.

    With value V, chroma C and m = V - C the hue in sixths of a turn is
    ``1 + (G + B - R - m) / C`` with the sign of ``G - B``, and the channels of hue h are
    ``m + C clamp(|6 frac((h + k) / 6) - 3| - 1, 0, 1)``, k = 0, 4, 2.

    ``turns`` (N,) are in [-0.5, 0.5].

    >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    >>> shift_hue_(red, turns=torch.tensor([1 / 3])).flatten().round()
    tensor([0., 1., 0.])
    """
    red, green, blue = images.unbind(1)
    low = images.amin(1)
    chroma = images.amax(1).sub_(low)
    distance = (green + blue).sub_(red).sub_(low).div_(chroma.clamp_min(_NO_CHROMA)).add_(1)
    hue = torch.copysign(distance, green - blue)
    thirds = torch.arange(3, 0, -1, device=images.device).view(3, 1, 1) % 3 / 3
    # Add a turn, because `frac` of a negative number is negative.
    angle = torch.add(turns.view(-1, 1, 1, 1) + 1 + thirds, hue.unsqueeze(1), alpha=1 / 6)
    wave = angle.frac_().sub_(0.5).abs_().mul_(6).sub_(1).clamp_(0, 1)
    return torch.addcmul(low.unsqueeze(1), chroma.unsqueeze(1), wave, out=images)


def _affine_(images: Tensor, keep: Tensor, grey: Tensor, mean: Tensor) -> None:
    red, green, blue = images.flatten(2).mean(2).unbind(1)
    average = GREY[0] * red + GREY[1] * green + GREY[2] * blue
    mixed = mix_channels(images, towards_grey(keep, grey), (mean * average).unsqueeze(1))
    torch.clamp(mixed, 0, 1, out=images)
