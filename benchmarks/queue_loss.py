"""InfoNCE against a queue and ProtoNCE against all prototypes: ours, plain, compiled, the host's.

    python benchmarks/queue_loss.py [--json FILE]

Forward and backward on one thread, all variants in turn, ten rounds after five to warm up; the
ratio is that of the median round to ours of the same round, `again` is ours a second time (what
equals differ by). The plain forms are written from the formula: logits, concatenation, cross
entropy. Memory is the largest sum of live allocations beyond the inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from solo_ext import host
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func

WARM, ROUNDS, BATCH, DIM = 5, 10, 256, 128
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
    return {
        "ours": (query, lambda: info_nce_loss_func(query, key, queue, 0.2)),
        "again": (query, lambda: info_nce_loss_func(query, key, queue, 0.2)),
        "plain": (query, lambda: plain_info_nce(query, key, queue)),
        "compiled": (query, lambda: compiled(query, key, queue)),
        # With the copy of the queue that its method makes of every step's.
        "solo-learn": (query, lambda: theirs(query, key, columns.clone(), 0.2)),
    }


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


def peak_mib(query: Tensor, loss: Loss) -> float:
    """Largest sum of live allocations of one step, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        torch.autograd.grad(loss(), query)
    held = most = 0
    events: Any = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20


def race(variants: dict[str, tuple[Tensor, Loss]]) -> dict[str, dict[str, float]]:
    """Milliseconds, ratio to ours, memory, and how far the gradient is from ours."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gradients = {}
    for turn in range(WARM + ROUNDS):
        for name, (query, loss) in variants.items():
            start = time.perf_counter()
            (gradients[name],) = torch.autograd.grad(loss(), query)
            if turn >= WARM:
                seconds[name].append(time.perf_counter() - start)
    ours = gradients["ours"]
    # solo-learn's and the plain forms do not normalise inside: compared across the sphere.
    query = variants["ours"][0].detach()
    tangent = {n: g - (g * query).sum(1, keepdim=True) * query for n, g in gradients.items()}
    return {
        name: {
            "ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(
                t / own for t, own in zip(times, seconds["ours"], strict=True)
            ),
            "mib": peak_mib(*variants[name]),
            "gradient_error": float((tangent[name] - tangent["ours"]).norm() / ours.norm()),
        }
        for name, times in seconds.items()
    }


def main() -> None:
    """Prints a table per loss and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    for label, make, sizes in (
        ("InfoNCE", info_nce, (4096, 16384, 65536)),
        ("ProtoNCE", proto_nce, (1000, 25000, 100000)),
    ):
        for size in sizes:
            found[f"{label} {size}"] = rows = race(make(size))
            print(f"{label}, N {BATCH}, D {DIM}, K {size}")
            for name, row in rows.items():
                print(
                    f"  {name:12} {row['ms']:9.2f} ms  {row['ratio']:5.2f} x  {row['mib']:8.1f} MiB"
                    f"  gradient {row['gradient_error']:.1e}"
                )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
