"""Online evaluation beside processes that wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_script

MakeConfig = Callable[..., dict[str, Any]]
TIMEOUT = 6.0


@pytest.fixture(scope="module")
def ended(make_config: MakeConfig, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How both processes of two runs ended."""
    folder = tmp_path_factory.mktemp("online")
    config = make_config(
        "simclr",
        data={"val_path": str(images)},
        optimizer={"batch_size": 12},
        online_eval={"every_n_epochs": 1, "protocols": ["knn"]},
        devices=2,
        strategy="ddp",
    )
    (folder / "config.json").write_text(json.dumps(config))
    run_script(Path(__file__).with_name("online_ranks.py"), folder)
    return folder


def read(folder: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{run}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_it_may_outlast_the_timeout(ended: Path) -> None:
    for found in read(ended, "slow"):
        assert not found["said"]
        assert found["seconds"] > TIMEOUT
    lines = (ended / "slow" / "metrics.jsonl").read_text()
    assert lines.count("online_knn_acc1") == 2


@pytest.mark.slow
@pytest.mark.fault
def test_its_failure_ends_both(ended: Path) -> None:
    first, second = read(ended, "fails")
    assert first["said"] == "OSError: no space left on device"
    assert second["said"] == "RankError: rank 0: OSError: no space left on device"
