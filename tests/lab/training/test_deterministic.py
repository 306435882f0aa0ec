"""``deterministic: true``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.lab.training.same_run import assert_same_run, train

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
MakeConfig = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("method", ["mochi", "nnclr_symmetric", "pcl"])
def test_on_a_cpu_it_changes_no_number(
    method: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Every operation has a deterministic form there, and is one without being asked."""
    train(make_config(method), tmp_path / "plain")
    seen: list[bool] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    config = prepare(make_config(method, deterministic=True))
    pretrain(config, run_dir=tmp_path / "asked", callbacks=[watch], show_progress=False)
    assert seen == [True, True]
    assert_same_run(tmp_path / "plain", tmp_path / "asked")


def test_it_ends_with_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """Whatever else the process does is as before, also after a run that fails."""

    def fail(*_: Any) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("stopped here")

    config = prepare(make_config("debiased", deterministic=True, benchmark=False))
    environment = dict(os.environ)
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(UserError, match=r"first step .*stopped here"):
            pretrain(config, run_dir=tmp_path, callbacks=[LambdaCallback(on_train_start=fail)])
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(WORKSPACE) == environment.get(WORKSPACE)
