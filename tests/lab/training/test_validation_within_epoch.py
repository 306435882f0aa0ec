"""Validations within an epoch come once each, wherever the run is stopped and resumed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback

from solo_ext.core.errors import StoppedBySignal
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import checkpoints
from tests.lab.training.resumable import STEPS, KillAt, config_of
from tests.lab.training.same_run import assert_same_run, logged, train

MakeConfig = Callable[..., dict[str, Any]]
BATCH = STEPS + 4
"""So many batches are done when the second epoch's second validation is due."""


def killed_within() -> Callback:
    """Before it has said anything."""

    def kill(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == BATCH - 1:
            raise RuntimeError("killed")

    return LambdaCallback(on_validation_start=kill)


def killed_after() -> Callback:
    return KillAt(BATCH)


def signalled(hook: str) -> Callable[[], Callback]:
    """Within the step before it, or within itself."""

    def make() -> Callback:
        def send(trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == BATCH - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return LambdaCallback(**{hook: send})

    return make


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("stop", "validated", "accumulated"),
    [
        (killed_within, False, 2),
        (killed_after, True, 1),
        (signalled("on_train_batch_start"), True, 2),
        (signalled("on_validation_start"), True, 1),
    ],
    ids=["killed-within", "killed-after", "signal-before", "signal-within"],
)
def test_the_log_is_that_of_the_whole_run(
    stop: Callable[[], Callback],
    validated: bool,
    accumulated: int,
    make_config: MakeConfig,
    images: Path,
    tmp_path: Path,
) -> None:
    config = config_of(
        make_config,
        "debiased",
        data={"val_path": str(images)},
        val_check_interval=2,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulated,
    )
    train(config, tmp_path / "whole")
    assert sum("val_acc1" in line for line in logged(tmp_path / "whole")) == 3 * STEPS // 2
    parts = tmp_path / "parts"
    with pytest.raises((RuntimeError, StoppedBySignal), match=r"killed|SIGTERM"):
        train(config, parts, callbacks=[stop()])
    # One is written after its validation, where one is due.
    batches = BATCH if validated else BATCH - accumulated
    assert checkpoints(parts)[-1].step == batches // accumulated
    resume(parts)
    assert_same_run(tmp_path / "whole", parts)
