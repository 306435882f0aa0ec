"""Writing a batch into queues, and the moving average of a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Work
from benchmarks.operation import Case, Goal, Setup, peer, unit
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.host.patches import PATCHES
from solo_ext.memory.features import FeatureQueue, SupportSet

SIZE, BATCH, DIM = 65536, 256, 128


def two_queues(effort: Effort) -> Setup:
    """Variants of a step that writes to the queues of both views."""
    size = effort.size(SIZE)
    # solo-learn's asserts that one divides the other.
    count = min(BATCH, size)
    batch = [unit(effort, count, DIM) for _ in range(2)]
    queues = [FeatureQueue(size, DIM).to(effort.device) for _ in range(2)]
    write = host.load().solo.methods.MoCoV2Plus._dequeue_and_enqueue
    held = SimpleNamespace(
        queue=torch.stack([unit(effort, size, DIM).T for _ in range(2)]).contiguous(),
        queue_ptr=torch.zeros(1, dtype=torch.long, device=effort.device),
        queue_size=size,
    )

    def ours() -> None:
        for queue, rows in zip(queues, batch, strict=True):
            queue.update_(rows)

    def theirs_without_copy() -> None:
        write(held, torch.stack(batch))

    def theirs() -> None:
        # What the loss is handed.
        held.queue.clone().detach()
        theirs_without_copy()

    return Setup({"ours": ours, "solo-learn": theirs, "columns only": theirs_without_copy})


def one_queue(effort: Effort) -> Setup:
    """Variants of a step that writes to one queue."""
    size = effort.size(SIZE)
    rows = unit(effort, min(BATCH, size), DIM)
    queue, columns = FeatureQueue(size, DIM).to(effort.device), unit(effort, size, DIM).T.clone()
    support, ids = (
        SupportSet(size, DIM).to(effort.device),
        torch.arange(len(rows), device=effort.device),
    )
    place = 0

    def moco() -> None:
        nonlocal place
        columns.clone()
        columns[:, place : place + len(rows)] = rows.T
        place = (place + len(rows)) % size

    def lightly(module: Any) -> Work:
        bank = module.MemoryBankModule(size=(size, DIM)).to(effort.device)
        return lambda: bank(rows, update=True)

    return Setup(
        {
            "ours": lambda: queue.update_(rows),
            "support set": lambda: support.update_(rows, ids, ids),
            "plain (PCL, MoCo)": moco,
            "lightly": peer("lightly.models.modules.memory_bank", lightly),
        }
    )


def moving_average(effort: Effort) -> Setup:
    """The update of a momentum network: the patch ``momentum-update``, and the host's own."""
    from timm import create_model

    name = "resnet50" if effort.shrink == 1 else "resnet10t"
    networks: list[nn.Module] = [create_model(name).to(effort.device) for _ in range(2)]
    updater = host.load().solo.utils.momentum.MomentumUpdater(0.99, 1.0)
    # The host's own gives parameters new memory, which the patch keeps.
    own = type(updater).update
    ((_, _, patched),) = PATCHES["momentum-update"].replacements()
    return Setup(
        {
            "ours": lambda: patched(updater, *networks),
            "solo-learn": lambda: own(updater, *networks),
        }
    )


CASES = (
    Case(
        "update of two queues of 65,536 x 128",
        two_queues,
        (
            Goal("solo-learn", 100, most_mib=0),
            # solo-learn's reads its pointer.
            Goal(most_launches=4),
            Goal("columns only", 0),
            Goal("solo-learn", 0, device="cuda", most_mib=0),
        ),
    ),
    Case(
        "update of one queue of 65,536 x 128",
        one_queue,
        (
            Goal("plain (PCL, MoCo)", 100, most_mib=0),
            Goal("lightly", 100),
            Goal("plain (PCL, MoCo)", 0, ours="support set"),
        ),
    ),
)
EMA = (
    Case(
        "EMA of ResNet-50",
        moving_average,
        (
            Goal("solo-learn", 2.5, most_mib=0, most_launches=1),
            Goal("solo-learn", 0, device="cuda", most_mib=0, most_launches=1),
        ),
    ),
)
