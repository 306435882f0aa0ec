"""Online evaluation in a run of two processes, of which the second waits for the first.

The file is also the script of those processes: ``test_online_ranks.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from solo_ext.lab.evaluation.online import OnlineEvaluation
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

TIMEOUT = 6.0
numbers = OnlineEvaluation._numbers


@pytest.mark.slow
@pytest.mark.fault
def test_it_may_outlast_the_timeout_and_its_failure_ends_both(
    make_config: Callable[..., dict[str, Any]], images: Path, tmp_path: Path
) -> None:
    # The script itself runs where the tests cannot be imported.
    from tests.scripts import run_script

    config = make_config(
        "simclr",
        data={"val_path": str(images)},
        optimizer={"batch_size": 12},
        online_eval={"every_n_epochs": 1, "protocols": ["knn"]},
        devices=2,
        strategy="ddp",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_script(Path(__file__), tmp_path)
    slow, fails = (
        [json.loads((tmp_path / f"{run}-{rank}.json").read_text()) for rank in range(2)]
        for run in ("slow", "fails")
    )
    for said, seconds in slow:
        assert not said
        assert seconds > TIMEOUT
    lines = (tmp_path / "slow" / "metrics.jsonl").read_text()
    assert lines.count('"online_knn_acc1":') == 2
    assert fails[0][0] == "OSError: no space left on device"
    assert fails[1][0] == "RankError: rank 0: OSError: no space left on device"


class Impatient(Callback):
    """Has the process group give up after some seconds."""

    def on_train_start(self, *_: Any) -> None:
        limit: Any = dist.distributed_c10d
        limit._set_pg_timeout(timedelta(seconds=TIMEOUT))


def slow(self: OnlineEvaluation, module: Any, epoch: int) -> dict[str, float]:
    # Once is enough: the limit holds in the last measurement, which is like the first.
    if epoch == 1:
        time.sleep(1.5 * TIMEOUT)
    return numbers(self, module, epoch)


def fails(self: OnlineEvaluation, *_: Any) -> dict[str, float]:
    raise OSError("no space left on device")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for measure in (slow, fails):
        setattr(OnlineEvaluation, "_numbers", measure)  # noqa: B010
        prepared = prepare(json.loads((folder / "config.json").read_text()))
        begin, said, name = time.monotonic(), "", measure.__name__
        try:
            pretrain(prepared, run_dir=folder / name, callbacks=[Impatient()], show_progress=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        file = folder / f"{name}-{os.environ.get('LOCAL_RANK', '0')}.json"
        file.write_text(json.dumps([said, time.monotonic() - begin]))
