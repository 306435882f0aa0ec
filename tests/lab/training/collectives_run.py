"""Runs that Lightning starts once per process, for ``test_collectives.py``.

python collectives_run.py FOLDER, which holds ``configs.json``: runs by name
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
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of torch's collectives, those of DDP included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._schema.name.partition("::")[2].rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


class Notes(Callback):
    """Saves the calls of every step, and logs a number that differs between steps and processes."""

    def __init__(self, file: Path) -> None:
        self.file, self.collectives = file, Collectives()
        self.steps: list[dict[str, int]] = []

    def on_train_start(self, trainer: Any, method: Any) -> None:
        # Left again in another hook, which `with` cannot do.
        self.collectives.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        calls, self.collectives.calls = self.collectives.calls, Counter()
        if batch_idx:
            self.steps.append(dict(calls))

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = float(trainer.global_rank + 10 * batch_idx)
        method.log("number", number, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.collectives.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.file.write_text(json.dumps(self.steps))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        # The rank is known before the processes have met.
        notes = Notes(folder / f"{name}-{int(os.environ.get('LOCAL_RANK', 0))}.json")
        pretrain(prepare(config), run_dir=folder / name, callbacks=[notes], show_progress=False)
