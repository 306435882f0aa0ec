"""``deterministic: true``, and networks that torch compiles."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.conftest import MakeConfig
from tests.lab.training.resumable import STEPS, config_of
from tests.lab.training.same_run import assert_resumes, assert_same_run, train

REST = ("debiased", "hard_negative", "metric", "nnclr_symmetric", "protocpc", "protoseed")


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


def test_it_is_of_one_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """The next one in the process computes as its own config says."""
    train(make_config("debiased", deterministic=True), tmp_path / "first")
    assert torch.are_deterministic_algorithms_enabled()
    train(make_config("debiased"), tmp_path / "second")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("mochi", "pcl", "seed", "simclr")),
        *(pytest.param(m, marks=pytest.mark.matrix) for m in REST),
    ],
)
def test_traced_and_resumed_it_is_the_same_run(
    method: str, make_config: MakeConfig, make_distilled: MakeConfig, tmp_path: Path
) -> None:
    """With a backend that runs the traced graphs as they are."""
    config = config_of(make_distilled if method in ("seed", "protoseed") else make_config, method)
    compiled = config | {"performance": {"compile": "eager"}}
    assert_resumes(config, tmp_path, STEPS + 2, parts=compiled)


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_compiled_for_the_device_and_resumed_it_is_the_same_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    assert_resumes(
        config_of(make_config, "debiased", performance={"compile": True}), tmp_path, STEPS + 2
    )


def test_backends_have_names(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"performance\.compile='eagr'.*eager"):
        prepare(make_config("debiased", performance={"compile": "eagr"}))
