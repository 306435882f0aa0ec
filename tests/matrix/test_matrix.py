"""Every method by every check: resuming, kills, several processes, AMP, accumulation, crops, DALI.

``pytest -m matrix`` runs all and renews ``benchmark_results/matrix``; without it, one row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext import host
from solo_ext.errors import ConfigError
from solo_ext.training.prepare import prepare
from solo_ext.training.pretrain import pretrain, resume
from tests.matrix.killing import Server
from tests.matrix.record import Outcome
from tests.matrix.rows import CHECKS, LOCAL, PLUGIN, VIT, methods
from tests.training.resumable import STEPS, KillAt
from tests.training.same_run import assert_same_run

ConfigOf = Callable[..., dict[str, Any]]
Noted = Callable[[int], dict[str, list[dict[str, Any]]]]
MULTI_CROP = [{"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}]
IN_CI = ("pcl",)
KILLS = 10
MIDWAY, AT_EPOCH = STEPS + 2, STEPS


def resumed(folder: Path, config: dict[str, Any], step: int) -> Outcome:
    """A run that is stopped before a step and resumed, against one that is not."""
    whole, parts = folder / "whole", folder / "parts"
    pretrain(prepare(config), run_dir=whole, show_progress=False)
    with pytest.raises(RuntimeError, match="killed"):
        pretrain(prepare(config), run_dir=parts, callbacks=[KillAt(step)], show_progress=False)
    resume(parts)
    assert_same_run(whole, parts)
    return Outcome("equal")


def killed(folder: Path, config: dict[str, Any]) -> Outcome:
    """Ten times, with SIGKILL."""
    if not hasattr(os, "fork"):
        pytest.skip("processes of POSIX")
    server = Server(folder, config)
    try:
        _, how = server.kill_at_random(folder / "whole", folder / "parts", KILLS)
    finally:
        server.close()
    assert_same_run(folder / "whole", folder / "parts")
    return Outcome("equal", how)


def together(method: str, noted: Noted, processes: int) -> Outcome:
    """Two steps without batch norm, of several processes and of one on the joined batch."""
    (alone,), ranks = noted(1)[method], noted(processes)[method]
    for found in (alone, *ranks):
        assert "error" not in found, found["error"]
    moved = 0.0
    for key, start in alone["start"].items():
        end, first = alone["state"][key], ranks[0]["state"][key]
        if end.is_floating_point() and end.numel() and not _is_table(key):
            moved = max(moved, float((end - start).abs().max()))
        for found in ranks[1:]:
            assert torch.equal(found["state"][key], first), key
    assert moved > 1e-3, "the run must move its weights"
    try:
        for key, end in alone["state"].items():
            # Rows lie in the order of the processes there.
            if not _is_table(key):
                torch.testing.assert_close(
                    ranks[0]["state"][key], end, rtol=1e-4, atol=1e-5, msg=key
                )
    except AssertionError:
        if method not in LOCAL:
            raise
        return Outcome("agree", LOCAL[method])
    return Outcome("close")


def _is_table(key: str) -> bool:
    tables = "queue", "queues", "support_set", "prototypes", "bank", "clusters"
    return key.startswith(tables) and key != "prototypes.weight"


def in_one_process(method: str, check: str, config_of: ConfigOf, folder: Path) -> Outcome:
    """The checks that compare runs of one process with each other."""
    if check == "resume at epoch":
        return resumed(folder, config_of(method), AT_EPOCH)
    if check == "resume mid-epoch":
        return resumed(folder, config_of(method), MIDWAY)
    if check == "kill -9":
        return killed(folder, config_of(method))
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
    try:
        prepare(config)
    except ConfigError as error:
        return Outcome("refused", str(error))
    return Outcome(resumed(folder, config, MIDWAY).word, "2 + 2 crops, resumed mid-epoch")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "check"),
    [
        pytest.param(m, c, marks=() if m in IN_CI and "processes" not in c else pytest.mark.matrix)
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
) -> None:
    """To the last bit; several processes to floating-point precision."""
    try:
        if "processes" in check:
            came_to(together(method, noted, int(check.split()[0])))
        else:
            came_to(in_one_process(method, check, matrix_config, tmp_path))
    except pytest.skip.Exception as missing:
        came_to(Outcome("not run", str(missing)))
        raise


def test_rows_are_all_methods() -> None:
    assert set(host.load().methods) - {"base", "linear"} <= set(methods())
    assert set(PLUGIN) <= set(methods())
