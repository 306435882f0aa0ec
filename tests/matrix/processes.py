"""Runs that Lightning starts once per process, for the matrix.

python processes.py FOLDER, which holds ``configs.json``: runs by method
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))

from contrastive_run import from_the_hardest_down, same_draws

from solo_ext.methods import drawn_mixing
from solo_ext.training.prepare import prepare
from solo_ext.training.pretrain import pretrain


class Notes(Callback):
    """Takes batch norm out, and saves what this process holds before and after."""

    def __init__(self, file: Path) -> None:
        self.file, self.start = file, dict[str, Any]()

    def setup(self, trainer: Any, method: Any, stage: str) -> None:
        # A teacher's is frozen.
        for name, parent in method.named_modules():
            for child, layer in parent.named_children() if "teacher" not in name else ():
                if isinstance(layer, _BatchNorm):
                    setattr(parent, child, nn.Identity())

    def on_train_start(self, trainer: Any, method: Any) -> None:
        self.start = {k: v.clone() for k, v in method.state_dict().items()}

    def on_train_end(self, trainer: Any, method: Any) -> None:
        state = {k: v.clone() for k, v in method.state_dict().items()}
        torch.save({"start": self.start, "state": state}, self.file)


def main(folder: Path) -> None:
    """Trains them one after the other; what goes wrong in one is its note."""
    torch.set_num_threads(1)
    setattr(drawn_mixing, "draw_mixes", same_draws)  # noqa: B010
    setattr(drawn_mixing, "Mixing", from_the_hardest_down)  # noqa: B010
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        # The rank is known before the processes have met.
        file = folder / f"{name}-{int(os.environ.get('LOCAL_RANK', 0))}.pt"
        try:
            notes = Notes(file)
            prepared = prepare(config)
            pretrain(prepared, run_dir=folder / name, callbacks=[notes], show_progress=False)
        except Exception:
            torch.save({"error": traceback.format_exc()}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
