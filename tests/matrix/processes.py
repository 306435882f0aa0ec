"""Runs that Lightning starts once per process, for the matrix.

python processes.py FOLDER [in-turn], which holds ``configs.json``: runs by name

In turn: one process takes the batches that several would, and accumulates them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))

from contrastive_ranks import fix_draws

from solo_ext.data.views import EpochSampler
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

ORDER = EpochSampler.__iter__


class Notes(Callback):
    """Takes batch norm out, and saves what this process holds before and after.

    Also which parameters are trained, by group and without the online classifier's.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.start = file, dict[str, Any]()
        self.trained: list[list[str]] = []

    def setup(self, trainer: Any, method: Any, stage: str) -> None:
        # A teacher's is frozen.
        for name, parent in method.named_modules():
            for child, layer in parent.named_children() if "teacher" not in name else ():
                if isinstance(layer, _BatchNorm):
                    setattr(parent, child, nn.Identity())

    def on_train_start(self, trainer: Any, method: Any) -> None:
        self.start = {k: v.clone() for k, v in method.state_dict().items()}
        names = {parameter: name for name, parameter in method.named_parameters()}
        self.trained = [
            [names[p] for p in group["params"] if p.requires_grad]
            for group in method.learnable_params
            if "classifier" not in group.get("name", "")
        ]

    def on_train_end(self, trainer: Any, method: Any) -> None:
        state = {k: v.clone() for k, v in method.state_dict().items()}
        torch.save({"start": self.start, "state": state, "trained": self.trained}, self.file)


def in_turn(config: dict[str, Any]) -> Callable[[EpochSampler], Iterator[Any]]:
    """The order of one process that accumulates the batches of several, as each would draw it."""
    parts = config["accumulate_grad_batches"]
    joined = parts * config["optimizer"]["batch_size"]

    def order(sampler: EpochSampler) -> Iterator[Any]:
        keys = list(ORDER(sampler))
        for begin in range(0, len(keys), joined):
            for part in range(parts):
                yield from keys[begin : begin + joined][part::parts]

    return order


def main(folder: Path, *words: str) -> None:
    """Trains them one after the other; what goes wrong in one is its note."""
    torch.set_num_threads(1)
    fix_draws()
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        # The rank is known before the processes have met.
        file = folder / f"{name}-{int(os.environ.get('LOCAL_RANK', 0))}.pt"
        if words:
            setattr(EpochSampler, "__iter__", in_turn(config))  # noqa: B010
        try:
            notes = Notes(file)
            prepared = prepare(config)
            pretrain(prepared, run_dir=folder / name, callbacks=[notes], show_progress=False)
        except Exception:
            torch.save({"error": traceback.format_exc()}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
