"""Runs whose networks torch compiles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.methods import METHODS, load_all
from tests.conftest import MakeConfig
from tests.lab.training.resumable import STEPS, config_of
from tests.lab.training.same_run import assert_resumes

load_all()


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("method", [*sorted(METHODS), "simclr"])
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
