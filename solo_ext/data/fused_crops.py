"""One view of every image of a batch, as one Triton kernel: a program makes one image's crop.

It computes what :meth:`solo_ext.data.batch_augment.BatchAugment` computes by torch's operations, in
the same order. This file can only be imported if Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from solo_ext.data import batch_draws

_COLUMNS, _STEPS = tl.constexpr(batch_draws.COLUMNS), tl.constexpr(batch_draws.STEPS)
_TOP, _LEFT = tl.constexpr(batch_draws.TOP), tl.constexpr(batch_draws.LEFT)
_HEIGHT, _WIDTH = tl.constexpr(batch_draws.HEIGHT), tl.constexpr(batch_draws.WIDTH)
_FLIP, _PLACE = tl.constexpr(batch_draws.FLIP), tl.constexpr(batch_draws.PLACE)
_HUE, _GRAY = tl.constexpr(batch_draws.HUE), tl.constexpr(batch_draws.GRAY)
_RADIUS, _SOLARIZED = tl.constexpr(batch_draws.RADIUS), tl.constexpr(batch_draws.SOLARIZED)
_AFFINE = tl.constexpr(batch_draws.AFFINE)


@triton.jit
def _scaled(source, stride, out, start, length, first, resized, inside):
    """Bicubic interpolation along one axis, whose pixels in memory are ``stride`` apart.

    Output pixel ``out`` is pixel ``first + out`` of the ``resized`` ones that ``length`` pixels
    from ``start`` on are scaled to.
    """
    wider = tl.maximum(resized, length)
    middle = (2 * (first + out) + 1) * length
    lowest = tl.maximum(middle - 4 * wider, 0) // (2 * resized)
    total, weighed = tl.zeros(out.shape, tl.float32), tl.zeros(inside.shape, tl.float32)
    for tap in range((4 * wider + resized - 1) // resized + 2):
        place = lowest + tap
        # The distance is a ratio of integers, so that only the division rounds.
        distance = tl.abs((2 * place + 1) * resized - middle)
        x = distance.to(tl.float32) / (2 * wider).to(tl.float32)
        near = (x - 1) * ((1.5 * x - 1) * x - 1)
        far = -0.5 * (x - 1) * (x - 2) * (x - 2)
        weight = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
        weight = tl.where(place < length, weight, 0.0)
        there = inside & (place < length)
        pixel = tl.load(source + (start + place) * stride, mask=there, other=0)
        total += weight
        weighed += weight * pixel.to(tl.float32)
    return weighed / tl.where(total == 0, 1.0, total)


@triton.jit
def _clipped(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _grey(red, green, blue):
    return 0.299 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _wave(low, chroma, angle):
    part = tl.abs(angle - tl.floor(angle) - 0.5) * 6 - 1
    return low + chroma * _clipped(part)


@triton.jit
def _shifted(red, green, blue, turns):
    """The hue shift of :func:`solo_ext.data.batch_ops.shift_hue_`."""
    low = tl.minimum(tl.minimum(red, green), blue)
    chroma = tl.maximum(tl.maximum(red, green), blue) - low
    distance = tl.abs((green + blue - red - low) / tl.maximum(chroma, 1e-12) + 1)
    # One turn more, because rounding down a negative number would not drop its fraction.
    hue = tl.where(green < blue, -distance, distance) / 6 + (turns + 1)
    red = _wave(low, chroma, hue)
    green = _wave(low, chroma, hue + 2 / 3)
    blue = _wave(low, chroma, hue + 1 / 3)
    return red, green, blue


@triton.jit
def _half_width(radius):
    """Of the box whose variance is a third of the Gaussian's, in pixels beside the middle one."""
    variance = radius * radius / 3
    whole = tl.floor((tl.sqrt(12 * variance + 1) - 1) / 2)
    end = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    return whole + end / (6 * (variance - (whole + 1) * (whole + 1)))


@triton.jit
def _crop(
    images,
    draws,
    mean,
    std,
    across,
    views,
    H,
    W,
    S,
    resized_h,
    resized_w,
    first_h,
    first_w,
    JITTER: tl.constexpr,
    SHIFT: tl.constexpr,
    BLUR: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The view of image ``program_id(0)``; ``across`` (N, 3, H, S) and ``views`` keep steps."""
    n = tl.program_id(0).to(tl.int64)
    drawn = draws + n * _COLUMNS
    top, height = tl.load(drawn + _TOP).to(tl.int32), tl.load(drawn + _HEIGHT).to(tl.int32)
    left, width = tl.load(drawn + _LEFT).to(tl.int32), tl.load(drawn + _WIDTH).to(tl.int32)
    flip = tl.load(drawn + _FLIP).to(tl.int32)
    y, x = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_S)[None, :]
    inside = (y < H) & (x < S)
    mirrored = x + flip * (S - 1 - 2 * x)
    image, across = images + n * 3 * H * W, across + n * 3 * H * S
    for channel in range(3):
        line = image + (channel * H + y) * W
        scaled = _scaled(line, 1, mirrored, left, width, first_w, resized_w, inside)
        tl.store(across + (channel * H + y) * S + x, scaled, mask=inside)
    # What follows reads what other threads of this program have stored.
    tl.debug_barrier()
    y, plane = tl.arange(0, BLOCK_S)[:, None], S * S
    inside = (y < S) & (x < S)
    red = _scaled(across + x, S, y, top, height, first_h, resized_h, inside)
    green = _scaled(across + H * S + x, S, y, top, height, first_h, resized_h, inside)
    blue = _scaled(across + 2 * H * S + x, S, y, top, height, first_h, resized_h, inside)
    red, green, blue = _clipped(red / 255), _clipped(green / 255), _clipped(blue / 255)

    if JITTER:
        place, turns = tl.load(drawn + _PLACE).to(tl.int32), tl.load(drawn + _HUE)
        for step in range(_STEPS):
            if SHIFT:  # noqa: SIM102 - decided when the kernel is compiled, unlike the next
                if step == place:
                    red, green, blue = _shifted(red, green, blue, turns)
            weights = drawn + _AFFINE + 3 * step
            keep, tint = tl.load(weights), tl.load(weights + 1)
            grey = _grey(red, green, blue)
            average = tl.sum(tl.sum(tl.where(inside, grey, 0.0), 1), 0) / plane
            added = tint * grey + tl.load(weights + 2) * average
            red = _clipped(keep * red + added)
            green = _clipped(keep * green + added)
            blue = _clipped(keep * blue + added)
    grey, share = _grey(red, green, blue), tl.load(drawn + _GRAY)
    red += share * (grey - red)
    green += share * (grey - green)
    blue += share * (grey - blue)

    view = views + n * 3 * plane
    if BLUR:
        radius = tl.load(drawn + _RADIUS)
        if radius > 0:
            half = _half_width(radius)
            reach = tl.ceil(half).to(tl.int32)
            for turn in range(6):
                tl.store(view + y * S + x, red, mask=inside)
                tl.store(view + plane + y * S + x, green, mask=inside)
                tl.store(view + 2 * plane + y * S + x, blue, mask=inside)
                tl.debug_barrier()
                red, green, blue = tl.zeros_like(red), tl.zeros_like(green), tl.zeros_like(blue)
                down = turn // 3
                for tap in range(-reach, reach + 1):
                    # Of the middle pixel's box, what covers this pixel.
                    covered = tl.minimum(half + 1 - tl.abs(tap + 0.0), 1.0)
                    weight = covered / (2 * half + 1)
                    # The edge pixels are repeated.
                    i = tl.minimum(tl.maximum(y + down * tap, 0), S - 1)
                    j = tl.minimum(tl.maximum(x + (1 - down) * tap, 0), S - 1)
                    red += weight * tl.load(view + i * S + j)
                    green += weight * tl.load(view + plane + i * S + j)
                    blue += weight * tl.load(view + 2 * plane + i * S + j)
                tl.debug_barrier()
    solarized = tl.load(drawn + _SOLARIZED)
    red = tl.where(solarized > 0, tl.minimum(red, 1 - red), red)
    green = tl.where(solarized > 0, tl.minimum(green, 1 - green), green)
    blue = tl.where(solarized > 0, tl.minimum(blue, 1 - blue), blue)

    view += y * S + x
    tl.store(view, (red - tl.load(mean)) / tl.load(std), mask=inside)
    tl.store(view + plane, (green - tl.load(mean + 1)) / tl.load(std + 1), mask=inside)
    tl.store(view + 2 * plane, (blue - tl.load(mean + 2)) / tl.load(std + 2), mask=inside)


@torch.library.custom_op("solo_ext::fused_crops", mutates_args=())
def fused_crops(
    images: Tensor,
    draws: Tensor,
    mean: Tensor,
    std: Tensor,
    size: int,
    resized: Sequence[int] | None,
    jitter: bool,
    hue: bool,
    blur: bool,
) -> Tensor:
    """Normalised crops (N, 3, size, size), fp32, of images (N, 3, H, W), uint8.

    Args:
        images: sides of at most :data:`solo_ext.data.batch_augment.LARGEST_FUSED`.
        draws: (N, COLUMNS) of :mod:`solo_ext.data.batch_draws`, fp32; nothing is equalised.
        mean: (3,), fp32, of the normalisation; ``std`` likewise.
        size: side of the crops.
        resized: height and width to which whole images are scaled before their centre is taken;
            ``None``: each crop is scaled to ``size``.
        jitter: whether any image is jittered; ``hue`` and ``blur`` likewise.
    """
    images, (n, _, height, width) = images.contiguous(), images.shape
    views = torch.empty(n, 3, size, size, dtype=torch.float32, device=images.device)
    scaled = resized or (size, size)
    firsts = [round((side - size) / 2) for side in scaled]
    across = torch.empty(n, 3, height, size, dtype=torch.float32, device=images.device)
    blocks = triton.next_power_of_2(height), triton.next_power_of_2(size)
    _crop[(n,)](
        *(images, draws, mean, std, across, views, height, width, size, *scaled, *firsts),
        *(jitter, hue, blur, *blocks),
        num_warps=warps_of(max(blocks)),
    )
    return views


@fused_crops.register_fake
def _(images: Tensor, draws: Tensor, mean: Tensor, std: Tensor, size: int, *_: object) -> Tensor:
    return draws.new_empty(len(images), 3, size, size)


def warps_of(block: int) -> int:
    """Warps of a program whose longest side is padded to ``block`` pixels."""
    return min(max(block // 8, 1), 16)
