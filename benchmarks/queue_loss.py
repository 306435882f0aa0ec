"""InfoNCE against a queue and ProtoNCE against all prototypes: ours, plain, compiled, the host's.

    python benchmarks/queue_loss.py [--json FILE]        # lightly's too where installed

Forward and backward on one thread, all variants in turn, ten rounds after ten to warm up; the
ratio is that of the median round to ours of the same round, `again` is ours a second time (what
equals differ by). The plain forms are written from the formula: logits, concatenation, cross
entropy. Memory is the largest sum of live allocations beyond the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Record, Work, peak_mib, race, show
from torch import Tensor

from solo_ext import host
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func

try:
    from lightly.loss import NTXentLoss
except ImportError:
    NTXentLoss = None

ROUNDS, BATCH, DIM = 10, 256, 128
Loss = Callable[[], Tensor]


def unit(rows: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, DIM), dim=1)


def plain_info_nce(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    """The formula, as a (N, 1 + K) matrix of logits."""
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat((own, query @ queue.T), dim=1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))


def plain_proto_nce(query: Tensor, table: Tensor, phi: Tensor, ids: Tensor) -> Tensor:
    """The formula, as a (N, K) matrix of logits."""
    return F.cross_entropy(query @ table.T / phi, ids)


def info_nce(size: int) -> dict[str, tuple[Tensor, Loss]]:
    """Variants of InfoNCE with a queue of ``size``."""
    query, key, queue = unit(BATCH).requires_grad_(), unit(BATCH), unit(size)
    loaded = host.load().solo.losses
    theirs = getattr(loaded, "mocov2plus_loss_func", None) or loaded.moco_loss_func
    compiled = torch.compile(plain_info_nce, dynamic=False)
    columns = queue.T.contiguous()
    variants: dict[str, tuple[Tensor, Loss]] = {
        "ours": (query, lambda: info_nce_loss_func(query, key, queue, 0.2)),
        "again": (query, lambda: info_nce_loss_func(query, key, queue, 0.2)),
        "plain": (query, lambda: plain_info_nce(query, key, queue)),
        "compiled": (query, lambda: compiled(query, key, queue)),
        "bfloat16": (query, lambda: info_nce_loss_func(query, key, queue, 0.2, torch.bfloat16)),
        # With the copy of the queue that its method makes of every step's.
        "solo-learn": (query, lambda: theirs(query, key, columns.clone(), 0.2)),
    }
    if NTXentLoss is not None:
        loss = NTXentLoss(temperature=0.2, memory_bank_size=(size, DIM))
        # It takes in the keys of every step, which it cannot leave undone.
        loss.memory_bank.bank.copy_(queue)
        variants["lightly"] = (query, lambda: loss(query, key))
    return variants


def proto_nce(size: int) -> dict[str, tuple[Tensor, Loss]]:
    """Variants of ProtoNCE with all of ``size`` prototypes."""
    query, table, phi = unit(BATCH).requires_grad_(), unit(size), 0.1 + 0.2 * torch.rand(size)
    ids = torch.randint(size, (BATCH,))
    compiled = torch.compile(plain_proto_nce, dynamic=False)
    return {
        "ours": (query, lambda: proto_nce_loss_func(query, table, phi, ids)),
        "again": (query, lambda: proto_nce_loss_func(query, table, phi, ids)),
        "plain": (query, lambda: plain_proto_nce(query, table, phi, ids)),
        "compiled": (query, lambda: compiled(query, table, phi, ids)),
    }


def measure(variants: dict[str, tuple[Tensor, Loss]]) -> dict[str, dict[str, Any]]:
    """Milliseconds, ratio to ours, memory, and how far the gradient is from ours."""
    steps: dict[str, Work] = {
        name: lambda query=query, loss=loss: torch.autograd.grad(loss(), query)
        for name, (query, loss) in variants.items()
    }
    rows = race(steps, ROUNDS)
    gradients = {name: step()[0] for name, step in steps.items()}
    ours = gradients["ours"]
    # solo-learn's and the plain forms do not normalise inside: compared across the sphere.
    query = variants["ours"][0].detach()
    tangent = {n: g - (g * query).sum(1, keepdim=True) * query for n, g in gradients.items()}
    return {
        name: {
            **row,
            "mib": peak_mib(steps[name]),
            "gradient_error": float((tangent[name] - tangent["ours"]).norm() / ours.norm()),
        }
        for name, row in rows.items()
    }


def main() -> None:
    """Prints a table per loss and size."""
    found = Record(__doc__)
    for label, make, sizes in (
        ("InfoNCE", info_nce, (4096, 8192, 16384, 65536, 131072)),
        ("ProtoNCE", proto_nce, (1000, 25000, 100000)),
    ):
        for size in sizes:
            found[f"{label} {size}"] = rows = measure(make(size))
            print(f"{label}, N {BATCH}, D {DIM}, K {size}")
            for name, row in rows.items():
                show(name, row, f"gradient {row['gradient_error']:.1e}")
    found.write()


if __name__ == "__main__":
    main()
