"""Every method by every check: resuming, kills, several processes, AMP, accumulation, crops, DALI.

``pytest -m matrix`` runs all and renews ``results/matrix``; without it, one row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext import host
from solo_ext.config.compose import compose
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from tests.lab.training.resumable import STEPS, KillAt
from tests.lab.training.same_run import assert_same_run
from tests.matrix.compare import apart, assert_trained_alike, in_one_order
from tests.matrix.killing import Runs
from tests.matrix.record import Outcome, note_kills
from tests.matrix.rows import CHECKS, IN_TURN, LOCAL, OWN, PLUGIN, TWO_CROPS, VIT, methods

ConfigOf = Callable[..., dict[str, Any]]
Noted = Callable[..., dict[str, list[dict[str, Any]]]]
MULTI_CROP = [{"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}]
KILLS = {True: 10, False: 3}
"""Where the matrix alone is run, and else."""
HUNDRED = 100
MIDWAY, AT_EPOCH = STEPS + 2, STEPS


def resumed(folder: Path, config: dict[str, Any], step: int) -> Outcome:
    """A run that is stopped before a step and resumed, against one that is not."""
    whole, parts = folder / "whole", folder / "parts"
    pretrain(prepare(config), run_dir=whole, show_progress=False)
    with pytest.raises(RuntimeError, match="killed"):
        pretrain(prepare(config), run_dir=parts, callbacks=[KillAt(step)], show_progress=False)
    begun: list[int] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: begun.append(
            trainer.fit_loop.epoch_loop.total_batch_idx
        )
    )
    resume(parts, callbacks=[watch])
    assert begun[0] == step, "it must go on where it was stopped"
    assert_same_run(whole, parts)
    return Outcome("equal")


def killed(folder: Path, config: dict[str, Any], kills: int) -> Outcome:
    """So many times, with SIGKILL."""
    if not hasattr(os, "fork"):
        pytest.skip("processes of POSIX")
    runs = Runs(folder, config)
    how = runs.kill_at_random(folder / "whole", folder / "parts", kills, 1.0)
    assert_same_run(folder / "whole", folder / "parts")
    return Outcome("equal", how)


def in_processes(method: str, noted: Noted, processes: int) -> Outcome:
    """Two steps without batch norm, of several processes and of one on the joined batch."""
    (alone,), ranks = noted(1)[method], noted(processes)[method]
    own = OWN.get(method, ())
    assert_trained_alike(alone, ranks, own)
    generation, joined = host.load().info.generation, in_one_order(ranks, own)
    if method not in LOCAL[generation]:
        assert not apart(joined, alone)
        return Outcome("close")
    why = LOCAL[generation][method]
    assert apart(joined, alone), "it equals one process: rows.LOCAL is out of date"
    if method in IN_TURN[generation]:
        (found,) = noted(1, parts=processes)[method]
        assert not apart(ranks[0], found)
        why = f"{why}; one process that takes their batches in turn does the same"
    return Outcome("agree", why)


def in_one_process(
    method: str, check: str, config_of: ConfigOf, folder: Path, kills: int
) -> Outcome:
    """The checks that compare runs of one process with each other."""
    if check == "resume at epoch":
        return resumed(folder, config_of(method), AT_EPOCH)
    if check == "resume mid-epoch":
        return resumed(folder, config_of(method), MIDWAY)
    if check == "kill -9":
        return killed(folder, config_of(method, checkpoint={"every_n_steps": 1}), kills)
    if check == "AMP":
        # Of small convolutions in bfloat16 some CPU builds of torch give gradients that are none.
        config = config_of(method, precision="bf16-mixed", backbone=VIT)
        return Outcome(resumed(folder, config, MIDWAY).word, "bf16, resumed mid-epoch")
    if check == "accumulation":
        config = config_of(method, accumulate_grad_batches=2)
        return Outcome(resumed(folder, config, MIDWAY).word, "2 batches, resumed mid-epoch")
    if check == "DALI":
        pytest.importorskip("nvidia.dali")
        data = {"format": "dali"}
        config = config_of(method, data=data, dali={"device": "cpu"}, max_epochs=2)
        return Outcome(resumed(folder, config, MIDWAY).word, "on the CPU, resumed mid-epoch")
    assert check == "multi-crop"
    config = config_of(method, augmentations=MULTI_CROP)
    if method in TWO_CROPS[host.load().info.generation]:
        with pytest.raises(ConfigError, match=r"^augmentations\b") as refusal:
            prepare(config)
        return Outcome("refused", str(refusal.value))
    return Outcome(resumed(folder, config, MIDWAY).word, "2 + 2 crops, resumed mid-epoch")


def _in_ci(method: str, check: str) -> bool:
    # tests/lab/training has the others for both hosts.
    return method == "pcl" and "processes" not in check and not check.startswith("resume")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "check"),
    [
        pytest.param(m, c, marks=[pytest.mark.matrix, *([pytest.mark.ci] if _in_ci(m, c) else [])])
        for m in methods()
        for c in CHECKS
    ],
)
def test_cell(
    method: str,
    check: str,
    matrix_config: ConfigOf,
    noted: Noted,
    tmp_path: Path,
    came_to: Callable[[Outcome], None],
    request: pytest.FixtureRequest,
) -> None:
    """To the last bit; several processes to a hundredth of what the steps changed."""
    try:
        if "processes" in check:
            came_to(in_processes(method, noted, int(check.split()[0])))
        else:
            kills = KILLS[request.config.option.markexpr == "matrix"]
            came_to(in_one_process(method, check, matrix_config, tmp_path, kills))
    except pytest.skip.Exception as missing:
        came_to(Outcome("not run", str(missing)))
        raise
    except Exception as error:
        came_to(Outcome("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        raise


def test_rows_are_all_methods() -> None:
    assert set(host.load().methods) - {"base", "linear"} <= set(methods())
    assert set(PLUGIN) <= set(methods())
    assert set(LOCAL[host.load().info.generation]) <= set(methods())


CHANGES = [
    "max_epochs=60",
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
    "data.fraction=0.3",
    "data.augmentation=batch",
    "optimizer.batch_size=70",
    "method_kwargs.queue_size=300",
    "method_kwargs.warmup_epochs=5",
    "checkpoint.every_n_steps=1",
    "online_eval.every_n_epochs=20",
]


@pytest.mark.matrix
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """PCL: same weights, same optimiser, same queue and prototypes, same log, to the last bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = Runs(tmp_path, compose("digits/pcl", CHANGES))
    how = runs.kill_at_random(whole, parts, HUNDRED, 0.95)
    assert_same_run(whole, parts)
    assert not list(parts.glob("*.unreadable"))
    if request.config.option.markexpr == "matrix":
        note_kills(HUNDRED, how)
