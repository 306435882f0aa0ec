"""Runs of two processes of which the first one measures, for ``test_online_ranks.py``.

python online_ranks.py FOLDER, which holds ``config.json``
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from solo_ext.lab.evaluation.online import OnlineEvaluation
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

TIMEOUT = 6.0
numbers = OnlineEvaluation._numbers


class Impatient(Callback):
    """Has the process group give up after some seconds."""

    def on_train_start(self, *_: Any) -> None:
        limit: Any = dist.distributed_c10d
        limit._set_pg_timeout(timedelta(seconds=TIMEOUT))


def slow(self: OnlineEvaluation, *given: Any) -> dict[str, float]:
    time.sleep(1.5 * TIMEOUT)
    return numbers(self, *given)


def fails(self: OnlineEvaluation, *_: Any) -> dict[str, float]:
    raise OSError("no space left on device")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rank = os.environ.get("LOCAL_RANK", "0")
    for name, measure in {"slow": slow, "fails": fails}.items():
        setattr(OnlineEvaluation, "_numbers", measure)  # noqa: B010
        prepared = prepare(json.loads((folder / "config.json").read_text()))
        begin, said = time.monotonic(), ""
        try:
            pretrain(prepared, run_dir=folder / name, callbacks=[Impatient()], show_progress=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found = {"said": said, "seconds": time.monotonic() - begin}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
