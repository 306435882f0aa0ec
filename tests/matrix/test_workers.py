"""The same numbers from a seed, whatever reads the images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.lab.training.same_run import assert_same_run
from tests.matrix.record import note_workers

pytestmark = pytest.mark.matrix
ConfigOf = Callable[..., dict[str, Any]]
METHODS = ("pcl", "simclr")


@pytest.fixture(scope="module", params=METHODS)
def alone(
    request: pytest.FixtureRequest, matrix_config: ConfigOf, tmp_path_factory: Any
) -> tuple[str, Path]:
    """A run that reads its images itself."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    pretrain(prepare(matrix_config(request.param)), run_dir=folder, show_progress=False)
    return request.param, folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_change_no_number(
    num_workers: int,
    start_method: str,
    alone: tuple[str, Path],
    matrix_config: ConfigOf,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Weights, state and log, to the last bit."""
    method, expected = alone
    data = {"num_workers": num_workers, "start_method": start_method}
    pretrain(prepare(matrix_config(method, data=data)), run_dir=tmp_path, show_progress=False)
    assert_same_run(expected, tmp_path)
    if request.config.option.markexpr == "matrix":
        note_workers(method, start_method, num_workers)
