"""A run of PCL in two processes, of which the second fails to embed, for ``test_e_step_size.py``.

python e_step_error_run.py FOLDER key=value ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solo_ext.config.compose import compose
from solo_ext.core import distributed
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.methods import PCL
from solo_ext.methods.e_step import EStep


def embed(method: PCL, X: Tensor) -> Tensor:
    """Stands in for a device whose memory is full."""
    if distributed.rank() == 1:
        raise torch.OutOfMemoryError("of 9 GiB")
    z: Tensor = method.momentum_projector(method.momentum_forward(X)["feats"])
    return z


def refreshed(*args: Any) -> dict[str, float]:
    """Writes down the error of each process, and when."""
    try:
        return run(*args)
    except Exception as error:
        text = f"{type(error).__name__}: {error} at {time.time()}"
        (folder / f"rank-{distributed.rank()}.txt").write_text(text)
        raise


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run = EStep.run
    EStep.run = refreshed  # type: ignore[method-assign]
    PCL.embed = embed  # type: ignore[method-assign]
    prepared = prepare(compose("digits/pcl", sys.argv[2:]))
    pretrain(prepared, run_dir=folder / "run", show_progress=False)
