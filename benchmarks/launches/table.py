"""The rows: operations beside their plain forms, and whole steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.launches import steps
from benchmarks.launches.fake_cuda import fake_cuda
from benchmarks.launches.tracing import Cost, cost_of
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
from solo_ext.config.check import check_run
from solo_ext.config.compose import compose
from solo_ext.data.batch_augment import BatchAugment

EFFORT = Effort(device="cuda", compiled=False)
BF16 = "bfloat16"


class Row(NamedTuple):
    """What was counted of one operation or step.

    Attributes:
        ours: its cost.
        plain: that of the plain form; of a step there is none.
    """

    label: str
    ours: Cost
    plain: Cost | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = None if self.plain is None else _json(self.plain)
        return {"ours": _json(self.ours), "plain": plain}


def _json(cost: Cost) -> dict[str, Any]:
    counts = {"launches": len(cost), "bytes": cost.bytes, "copies": cost.copies}
    return {**counts, "flops": cost.flops, "waits": cost.waits}


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


def crops(side: int) -> Row:
    """The views of a batch by the kernel, beside torch's operations."""
    run = check_run(compose("cifar10/simclr", ["data.train_path=none", "accelerator=cpu"]))
    augment = BatchAugment("cifar10", run.augmentations, side, side, seed=5)
    draws = augment.draw(0, np.arange(run.optimizer.batch_size))
    with fake_cuda():
        steps.on_fake_cuda(augment)
        shape = run.optimizer.batch_size, 3, side, side
        images = torch.empty(shape, dtype=torch.uint8, device="cuda")
        ours = cost_of(lambda: augment(images, draws))
        with patch("solo_ext.data.batch_augment._has_triton", lambda _: False):
            plain = cost_of(lambda: augment(images, draws))
    return Row(f"two views of 256 images, {side} px", ours, plain)


def step(method: str) -> Row:
    """A whole step of the method's config."""
    with fake_cuda():
        cost = cost_of(steps.step(steps.CONFIGS[method]))
    return Row(f"step of {method}", cost, None)


ROWS: dict[str, Callable[[], Row]] = {
    "two views of 256 images, 32 px": partial(crops, 32),
    **{operation.label: operation.row for operation in OPERATIONS},
    **{f"step of {method}": partial(step, method) for method in steps.CONFIGS},
}
