"""Writing a batch into queues: ours, and what solo-learn's and MoCo's do in every step.

    python benchmarks/queue_update.py [--json FILE]

K 65,536, D 128, batch 256, one thread, all variants in turn, eleven rounds after ten to warm up;
the ratio is that of the median round to ours of the same round, `again` is ours a second time
(what equals differ by). solo-learn's MoCo v2+ keeps the queues of both views as columns of one
tensor, hands the loss a copy of it and writes columns; its own method does the writing. MoCo has
one such queue. Memory is the largest sum of live allocations beyond queues and keys.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from interleaved import Record, Work, peak_mib, race, show
from torch import Tensor

from solo_ext import host
from solo_ext.modules.feature_queue import FeatureQueue
from solo_ext.modules.support_set import SupportSet

ROUNDS, SIZE, BATCH, DIM = 11, 65_536, 256, 128


def keys() -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(BATCH, DIM), dim=1)


def two_views() -> dict[str, Work]:
    """Variants of a step that writes to the queues of both views."""
    batch, queues = [keys(), keys()], [FeatureQueue(SIZE, DIM) for _ in range(2)]
    methods = host.load().solo.methods
    write = methods.MoCoV2Plus._dequeue_and_enqueue
    held = SimpleNamespace(
        queue=F.normalize(torch.randn(2, DIM, SIZE), dim=1),
        queue_ptr=torch.zeros(1, dtype=torch.long),
        queue_size=SIZE,
    )

    def ours() -> None:
        for queue, rows in zip(queues, batch, strict=True):
            queue.update_(rows)

    def theirs() -> None:
        held.queue.clone().detach()
        write(held, torch.stack(batch))

    def theirs_without_copy() -> None:
        write(held, torch.stack(batch))

    return {"ours": ours, "again": ours, "solo-learn": theirs, "columns only": theirs_without_copy}


def one_view() -> dict[str, Work]:
    """Variants of a step that writes to one queue."""
    rows, queue, columns = keys(), FeatureQueue(SIZE, DIM), torch.randn(DIM, SIZE)
    support, ids = SupportSet(SIZE, DIM), torch.arange(BATCH)
    place = 0

    def moco() -> None:
        nonlocal place
        columns.clone()
        columns[:, place : place + BATCH] = rows.T
        place = (place + BATCH) % SIZE

    def ours() -> None:
        queue.update_(rows)

    return {
        "ours": ours,
        "again": ours,
        "MoCo": moco,
        "support set": lambda: support.update_(rows, ids, ids),
    }


def main() -> None:
    """Prints a table per number of queues."""
    found = Record(__doc__)
    for label, make in (("two queues", two_views), ("one queue", one_view)):
        variants = make()
        print(f"{label}, K {SIZE}, D {DIM}, batch {BATCH}")
        for name, row in race(variants, ROUNDS).items():
            found_row = {**row, "mib": peak_mib(variants[name])}
            found.setdefault(label, {})[name] = found_row
            show(name, found_row)
    found.write()


if __name__ == "__main__":
    main()
