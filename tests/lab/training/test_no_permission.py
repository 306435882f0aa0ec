"""Run directories that must not be written, and one that no longer may."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.lab.training.run_dir import checkpoints
from tests.lab.training.unprivileged_command import can_be_bound

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not can_be_bound(),
    reason="root, who writes everywhere, cannot give that up here",
)
MakeConfig = Callable[..., dict[str, Any]]
COMMAND = [
    sys.executable,
    str(Path(__file__).with_name("unprivileged_command.py")),
    "pretrain",
]
CLOSED, OPEN = 0o500, 0o700
EPOCHS = 20


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Callable[..., list[str]]:
    """``start(run_dir)``: the words that train a tiny run there."""

    def words(run_dir: Path, **changes: Any) -> list[str]:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(make_config("simclr", **changes)))
        named = ["--config-path", str(tmp_path), "--config-name", "mine"]
        return [*COMMAND, *named, "--run-dir", str(run_dir)]

    return words


@pytest.fixture
def closed() -> Iterator[Callable[[Path], None]]:
    """``closed(folder)``: nobody makes, removes or renames files in it until the test is over."""
    folders: list[Path] = []

    def close(folder: Path) -> None:
        folders.append(folder)
        folder.chmod(CLOSED)

    yield close
    for folder in folders:
        folder.chmod(OPEN)


def run(words: list[str]) -> tuple[int, list[str]]:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr.splitlines()


def held(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.fault
def test_a_folder_in_which_none_can_be_made(
    start: Callable[..., list[str]], closed: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    closed(folder)
    code, lines = run(start(folder / "run"))
    assert (code, len(lines)) == (2, 1), lines
    assert f"run directory '{folder}/run': Permission denied; name one that can" in lines[0]
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.fault
def test_one_that_is_there(
    start: Callable[..., list[str]], closed: Callable[[Path], None], tmp_path: Path
) -> None:
    """Before training, not at its first checkpoint; whether resumed or started again."""
    folder = tmp_path / "run"
    again = start(folder, max_epochs=2)
    assert run(again)[0] == 0
    before = held(folder)
    closed(folder)
    for words in ([*COMMAND, "--resume", str(folder)], again):
        code, lines = run(words)
        assert (code, len(lines)) == (2, 1), lines
        assert f"run directory '{folder}': Permission denied" in lines[0]
        assert held(folder) == before


@pytest.mark.slow
@pytest.mark.fault
def test_one_that_loses_its_permission_while_a_run_trains(
    start: Callable[..., list[str]], closed: Callable[[Path], None], tmp_path: Path
) -> None:
    """What was saved stays, and the run goes on once it may write again."""
    folder = tmp_path / "run"
    words = start(folder, max_epochs=EPOCHS)
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as training:
        while not list(folder.glob("*-ep=1.ckpt")):
            assert training.poll() is None, "the run ended before its first checkpoint"
            time.sleep(0.002)
        closed(folder)
        saved = checkpoints(folder, previous=True)
        assert saved
        _, err = training.communicate(timeout=300)
    last = err.splitlines()[-1]
    assert training.returncode == 2
    assert "Traceback" not in err
    assert last.startswith(f"solo-ext: checkpoint '{folder}/tiny-run-ep=")
    assert "cannot be written (" in last
    assert "Permission denied" in last
    assert "give it permission to write, then" in last
    assert f"`solo-ext pretrain --resume {folder}` goes on" in last
    kept = checkpoints(folder, previous=True)
    assert {one.path for one in saved} & {one.path for one in kept}
    assert kept[-1].epoch < EPOCHS - 1

    folder.chmod(OPEN)
    code, lines = run([*COMMAND, "--resume", str(folder)])
    assert code == 0, lines
    assert checkpoints(folder)[-1].epoch == EPOCHS - 1
    assert not list(folder.glob(".*.saving"))
