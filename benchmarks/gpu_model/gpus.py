"""What GPUs can do at most, from their makers' pages, and how much of it a kernel attains."""

from __future__ import annotations

from typing import NamedTuple


class GPU(NamedTuple):
    """Peaks of a GPU.

    Attributes:
        name: as its maker calls it.
        bandwidth: of its memory, bytes per second.
        flops: operations per second of dense matrix products, by the kind of their factors;
            "tf32": fp32 factors that may be rounded.
        source: where that is said.
    """

    name: str
    bandwidth: float
    flops: dict[str, float]
    source: str


_HOPPER = {
    "bfloat16": 989e12,
    "float16": 989e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 67e12,
}
_AMPERE = {
    "bfloat16": 312e12,
    "float16": 312e12,
    "tf32": 156e12,
    "float32": 19.5e12,
    "float64": 19.5e12,
}

GPUS = {
    "h100": GPU(
        "H100 SXM 80 GB", 3.35e12, _HOPPER, "https://www.nvidia.com/en-us/data-center/h100/"
    ),
    "h200": GPU("H200 SXM", 4.8e12, _HOPPER, "https://www.nvidia.com/en-us/data-center/h200/"),
    "a100": GPU(
        "A100 SXM 80 GB", 2.039e12, _AMPERE, "https://www.nvidia.com/en-us/data-center/a100/"
    ),
}
ATTAINED_BANDWIDTH, ATTAINED_FLOPS = 0.9, 0.8
"""Shares of the peaks that large copies and products of PyTorch reach; assumptions."""
LAUNCH = 5e-6
"""Seconds that the host takes to issue an operation, during which the device works on; likewise."""
