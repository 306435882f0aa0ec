"""Writing a batch into queues, and the moving average of a network."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from benchmarks.operation import Case, Goal, Setup, unit
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.host.patches import PATCHES
from solo_ext.memory.features import FeatureQueue

SIZE, BATCH, DIM = 65536, 256, 128


def two_queues(effort: Effort) -> Setup:
    """Variants of a step that writes to the queues of both views."""
    size, device = effort.size(SIZE), effort.device
    batch = [unit(effort, BATCH, DIM) for _ in range(2)]
    queues = [FeatureQueue(size, DIM).to(device) for _ in range(2)]
    write = host.load().solo.methods.MoCoV2Plus._dequeue_and_enqueue
    held = SimpleNamespace(
        queue=torch.stack([unit(effort, SIZE, DIM).T for _ in range(2)]).contiguous(),
        queue_ptr=torch.zeros(1, dtype=torch.long, device=device),
        queue_size=size,
    )

    def ours() -> None:
        for queue, rows in zip(queues, batch, strict=True):
            queue.update_(rows)

    def theirs() -> None:
        # What the loss is handed.
        held.queue.clone().detach()
        write(held, torch.stack(batch))

    return Setup({"ours": ours, "solo-learn": theirs})


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
            Goal("solo-learn", 0, device="cuda", most_mib=0),
        ),
    ),
)
EMA = (
    Case(
        "EMA of ResNet-50",
        moving_average,
        (
            Goal("solo-learn", 2.5, most_mib=0, most_launches=1),
            Goal("solo-learn", 0, device="cuda", most_mib=0),
        ),
    ),
)
