"""The rows of the model: operations beside their plain forms, and whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_model import steps
from benchmarks.gpu_model.fake_cuda import fake_cuda
from benchmarks.gpu_model.gpus import GPU, GPUS
from benchmarks.gpu_model.tracing import Cost, Kernel, cost_of
from benchmarks.speed.operation import OURS, Setup, on_device
from benchmarks.speed.rows import (
    in_batch,
    mochi,
    nearest,
    proto_nce,
    protocpc,
    queue_loss,
    sinkhorn,
)
from benchmarks.speed.target import Effort
from solo_ext.clustering.backends import nearest_by_flash
from solo_ext.clustering.lloyd import search
from solo_ext.core.precision import matmul_precision

EFFORT = Effort(device="cuda", compiled=False)
BF16 = "bfloat16"


class Row(NamedTuple):
    """What the model says of one operation or step.

    Attributes:
        ours: its cost.
        plain: that of the plain form; of a step there is none.
    """

    label: str
    ours: Cost
    plain: Cost | None

    def met(self, gpu: GPU) -> bool:
        """Whether ours is estimated no slower than the plain form, and the host never waits."""
        slower = self.plain and self.ours.milliseconds(gpu) > self.plain.milliseconds(gpu)
        return not slower and not self.ours.waits

    def as_json(self) -> dict[str, Any]:
        """Plain values; every one is an estimate."""
        return {
            "row": self.label,
            "ours": _json(self.ours),
            "plain": None if self.plain is None else _json(self.plain),
            "met": {name: self.met(gpu) for name, gpu in GPUS.items()},
        }


def _json(cost: Cost) -> dict[str, Any]:
    return {
        "launches": len(cost),
        "bytes": cost.bytes,
        "flops": cost.flops,
        "waits": cost.waits,
        "ms": {name: round(cost.milliseconds(gpu), 4) for name, gpu in GPUS.items()},
    }


class Operation(NamedTuple):
    """An operation of the speed table.

    Attributes:
        setup: makes its variants.
        ours, plain: names of the variants.
        unit: rows, width and whether they learn, of what the plain form takes as unit rows and
            ours normalises itself.
    """

    label: str
    setup: Callable[[Effort], Setup]
    plain: str
    ours: str = OURS
    unit: tuple[tuple[int, int, bool], ...] = ()

    def row(self) -> Row:
        """Traces both."""
        with fake_cuda():
            works = self.setup(EFFORT).works
            ours, plain = (cost_of(on_device(works[n], "cuda")) for n in (self.ours, self.plain))
            for shape in self.unit:
                plain += cost_of(on_device(partial(_normalise, *shape), "cuda"))
        return Row(self.label, ours, Cost(plain))


def _normalise(rows: int, width: int, learns: bool) -> None:
    x = torch.empty(rows, width, device="cuda", requires_grad=learns)
    unit = F.normalize(x, dim=1)
    if learns:
        torch.autograd.grad(unit, x, torch.empty_like(unit))


KEYS = ((256, 128, True), (256, 128, False))
"""Queries and keys."""


def _protocpc(size: int, width: int) -> dict[str, Any]:
    views = (protocpc.BATCH, width, True), (protocpc.BATCH, width, False)
    setup = partial(protocpc.step, size=size, dim=width, learns=True)
    return {"setup": setup, "plain": protocpc.PEER, "unit": views}


def _in_batch(size: int) -> list[Operation]:
    setup = partial(in_batch.setup, rows=size)
    return [
        Operation(f"debiased, 2N {size:,}", setup, "plain debiased, mask at once"),
        Operation(f"hard negatives, 2N {size:,}", setup, "plain hard, mask at once", in_batch.HARD),
        Operation(f"NT-Xent, 2N {size:,}", setup, "plain NT-Xent", "NT-Xent"),
    ]


QUEUE = partial(queue_loss.setup, size=65536)
NEAREST = partial(nearest.one, shape=nearest.SIZE)
LARGE = partial(proto_nce.setup, sizes=proto_nce.IMAGENET[0], negatives=proto_nce.IMAGENET[1])
SMALL = partial(proto_nce.setup, sizes=proto_nce.CIFAR[0], negatives=proto_nce.CIFAR[1])
PRIOR = _protocpc(65536, 256)
TEACHER = ((512, 128, True), (512, 128, False))
OPERATIONS = (
    Operation("InfoNCE 256 x 65,536", QUEUE, queue_loss.PLAIN, OURS, KEYS),
    Operation("InfoNCE 256 x 65,536, bf16", QUEUE, queue_loss.PLAIN, BF16, KEYS),
    Operation("nearest 512 x 98,304 x 256", NEAREST, "solo-learn"),
    *_in_batch(512),
    *_in_batch(4096),
    *_in_batch(16384),
    Operation("ProtoNCE 25k + 50k + 100k", LARGE, "plain, all", OURS, KEYS[:1]),
    Operation("ProtoNCE 25k + 50k + 100k, bf16", LARGE, "plain, all", BF16, KEYS[:1]),
    Operation("ProtoNCE 250 + 500 + 1,000", SMALL, "plain, all", OURS, KEYS[:1]),
    Operation("ProtoNCE 250 + 500 + 1,000, bf16", SMALL, "plain, all", BF16, KEYS[:1]),
    Operation("ProtoCPC 512 x 65,536 x 256", **PRIOR),
    Operation("ProtoCPC 512 x 65,536 x 256, bf16", ours=BF16, **PRIOR),
    Operation("Sinkhorn 512 x 65,536", partial(sinkhorn.setup, size=65536), sinkhorn.PLAIN),
    Operation("MoCHi 256 x 65,536", partial(mochi.setup, size=65536), mochi.PLAIN, unit=KEYS),
    Operation("SEED 512 x 65,536", protocpc.seed, "plain", OURS, TEACHER),
    Operation("SEED 512 x 65,536, bf16", protocpc.seed, "plain", BF16, TEACHER),
)

POINTS, CLUSTERS, WIDTH = 1_281_167, 100_000, 128
PART = 32
"""A share of the points is traced: all tiles are alike."""
BLOCK = 128
"""Points for which flash-kmeans' kernel reads the means once, on each of these GPUs."""


def k_means_pass() -> Row:
    """The nearest means of all points by flash-kmeans' kernel, beside torch's products."""

    def kernel(x: Tensor, *_: Tensor, **__: Tensor) -> Tensor:
        return torch.empty(1, x.shape[1], dtype=torch.int32, device="cuda")

    with fake_cuda(), matmul_precision("medium"):
        means = torch.empty(CLUSTERS, WIDTH, device="cuda")
        points = torch.empty(POINTS, WIDTH, device="cuda")
        with patch("flash_kmeans.assign_euclid_triton.euclid_assign_triton", kernel):
            ours = cost_of(lambda: nearest_by_flash(points, means))
        part = cost_of(lambda: search(points[: POINTS // PART], means, means.double().mean(0)))
    moved = 4 * WIDTH * (POINTS + CLUSTERS * math.ceil(POINTS / BLOCK)) + 4 * POINTS
    ours.append(Kernel("flash_kmeans", moved, 2 * POINTS * CLUSTERS * WIDTH, "tf32"))
    return Row("k-means pass 1.28M to 100k", ours, Cost(part * PART))


def step(method: str) -> Row:
    """A whole step of the method's config."""
    with fake_cuda():
        cost = cost_of(steps.step(steps.CONFIGS[method]))
    return Row(f"step of {method}", cost, None)


ROWS: dict[str, Callable[[], Row]] = {
    **{operation.label: operation.row for operation in OPERATIONS},
    "k-means pass 1.28M to 100k": k_means_pass,
    **{f"step of {method}": partial(step, method) for method in steps.CONFIGS},
}
