"""How much pytest measures of the speed table."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.speed.effort import QUICK, Effort

QUICK_OPTION = "--quick"


def pytest_addoption(parser: Any) -> None:
    """Adds ``--quick``."""
    parser.addoption(QUICK_OPTION, action="store_true", help="small sizes, gates are not judged")


@pytest.fixture(scope="session")
def effort(request: pytest.FixtureRequest) -> Effort:
    """Of all tests, on the GPU where there is one."""
    torch.set_num_threads(1)
    chosen = QUICK if request.config.getoption(QUICK_OPTION) else Effort()
    return replace(chosen, device="cuda" if torch.cuda.is_available() else "cpu")


if find_spec("pytest_benchmark") is None:

    @pytest.fixture
    def benchmark() -> None:
        """In place of pytest-benchmark's."""
        pytest.skip("pytest-benchmark is not installed")
