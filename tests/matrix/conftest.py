"""Configs of the matrix, runs of several processes, and the record of cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from solo_ext import host
from tests.lab.training.resumable import MakeConfig
from tests.matrix.record import Outcome, note
from tests.matrix.rows import IN_TURN
from tests.matrix.two_steps import BATCH, ConfigOf, config_maker, run_together, two_steps

Noted = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def matrix_config(make_config: MakeConfig, make_distilled: MakeConfig) -> ConfigOf:
    """``matrix_config(method, section={...}, ...)``: three epochs of six steps, on the CPU."""
    return config_maker(make_config, make_distilled)


@pytest.fixture(scope="session")
def noted(
    matrix_config: ConfigOf,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Noted:
    """``noted(n)[method]``: what each of n processes held in the end, without batch norm.

    With ``parts=p`` a step's gradient is the mean over the batches of p processes in turn.
    """
    cells = [item.callspec.params for item in request.session.items if _is_cell(item)]
    methods = sorted({c["method"] for c in cells if "processes" in c["check"]})
    known: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}

    def run(processes: int, parts: int = 1) -> dict[str, list[dict[str, Any]]]:
        key = processes, parts
        if key in known:
            return known[key]
        folder = tmp_path_factory.mktemp(f"processes-{processes}-{parts}")
        in_turn = IN_TURN[host.load().info.generation]
        chosen = methods if parts == 1 else [m for m in methods if m in in_turn]
        batch, changes = BATCH // processes // parts, {"accumulate_grad_batches": parts}
        configs = {m: two_steps(matrix_config, m, processes, batch, **changes) for m in chosen}
        known[key] = run_together(folder, configs, processes, *(["in-turn"] if parts > 1 else []))
        return known[key]

    return run


def _is_cell(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_cell"


@pytest.fixture
def came_to(request: pytest.FixtureRequest) -> Iterator[Callable[[Outcome], None]]:
    """``came_to(outcome)``: the record of this cell, written where the matrix alone is run."""
    begin, found = time.monotonic(), [Outcome("failed", "its test shows how")]
    yield found.append
    if request.config.option.markexpr == "matrix":
        assert isinstance(request.node, pytest.Function)
        cell = request.node.callspec.params
        note(cell["method"], cell["check"], found[-1], time.monotonic() - begin)
