"""Runs of ``test_footprint.py`` and ``test_collectives.py``; Lightning starts each process.

python traffic_run.py FOLDER, which holds ``configs.json``: runs by name
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.memory.state import State

COLLECTIVES = {"allreduce_": "all_reduce", "allgather_": "all_gather", "broadcast_": "broadcast"}


def size(tensors: Any) -> int:
    """Bytes of tensors, lists of them included."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(size(t) for t in tensors)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch's collectives and what this process gives them, DDP's included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self.calls[name.rstrip("_")] += 1
        if func.namespace == "c10d" and name != "barrier":
            # Of an all-gather the second argument is what a process brings along.
            own = args[1] if name == "allgather_" else args[0]
            # Under its own name what no step is to hold.
            self.bytes[COLLECTIVES.get(name, name)] += size(own)
        return func(*args, **(kwargs or {}))

    def taken(self) -> dict[str, int]:
        """The bytes since the last call."""
        found, self.bytes = dict(self.bytes), Counter()
        return found


class Notes(Callback):
    """Logs a number; saves calls of all steps, bytes of E-steps, a step, and what a rank holds."""

    def __init__(self, file: Path) -> None:
        self.file, self.collectives = file, Collectives()
        self.found: dict[str, Any] = {"e_steps": [], "calls": []}

    def on_train_start(self, trainer: Any, method: Any) -> None:
        # Left again in another hook, which `with` cannot do.
        self.collectives.__enter__()  # type: ignore[no-untyped-call]

    def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
        self.collectives.taken()

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        taken = self.collectives.taken()
        calls, self.collectives.calls = dict(self.collectives.calls), Counter()
        if batch_idx == 0:
            self.found["e_steps"].append(taken)
        else:
            self.found["calls"].append(calls)
            self.found.setdefault("step", taken)

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Differs between steps and processes; what a step sends must not show it.
        number = float(trainer.global_rank + 10 * batch_idx)
        method.log("number", number, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.collectives.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        learned = [p for p in method.parameters() if p.requires_grad]
        torch.save(
            {**self.found, "parameters": sum(p.numel() for p in learned), **held(method)}, self.file
        )


def held(method: nn.Module) -> dict[str, int]:
    """Bytes of state in checkpoints, and of batch norm outside what DDP leaves alone."""
    kept = method.state_dict()
    found = Counter[str]()
    alone = [m for m in method.modules() if isinstance(m, State) and m.frozen]
    frozen = {id(m) for root in alone for m in root.modules()}
    for prefix, module in method.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if isinstance(module, State):
            found["state"] += size(b for n, b in own.items() if f"{prefix}.{n}" in kept)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and id(module) not in frozen:
            found["batch_norm"] += size(own.values())
            if prefix.startswith("momentum_"):
                found["momentum_batch_norm"] += size(own.values())
    return dict(found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        # The rank is known before the processes have met.
        notes = Notes(folder / f"{name}-{int(os.environ.get('LOCAL_RANK', 0))}.pt")
        pretrain(prepare(config), run_dir=folder / name, callbacks=[notes], show_progress=False)
