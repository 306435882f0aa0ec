"""Run directories that must not be written, and one that no longer may."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from solo_ext.lab.training.run_dir import checkpoints
from tests import forks
from tests.conftest import MakeConfig
from tests.lab.training.same_run import command_of

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capset")
pytestmark = [pytest.mark.fault, pytest.mark.slow, linux]
Start = Callable[..., list[str]]
Close = Callable[..., None]
BOUND = """
import ctypes, sys
from solo_ext.lab.cli.main import main
libc = ctypes.CDLL(None)
header, held = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
assert libc.capget(header, held) == 0
held[0] &= ~0b110
assert libc.capset(header, held) == 0
sys.exit(main())
"""
"""``solo-ext`` without the two capabilities by which root writes and reads without permission."""
RESUME = ("-c", BOUND, "pretrain", "--resume")
READERS = {
    "config.yaml": ["resume"],
    "metrics.jsonl": ["resume"],
    "args.json": ["eval", "export"],
    "*.ckpt": ["resume", "eval", "export"],
    ".": ["resume", "eval", "export", "report"],
    "records.jsonl": ["report"],
}
"""Files of a run, or of a benchmark, and commands that read them."""
CLOSED, OPEN = 0o500, 0o700
EPOCHS = 20


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Start:
    """``start(run_dir)``: the words that train a tiny run there."""

    def words(run_dir: Path, **changes: Any) -> list[str]:
        return ["-c", BOUND, *command_of(make_config("simclr", **changes), tmp_path, run_dir)]

    return words


@pytest.fixture
def closed() -> Iterator[Close]:
    """``closed(folder)``: nobody makes, removes or renames files in it until the test is over."""
    folders: list[Path] = []

    def close(folder: Path, mode: int = CLOSED) -> None:
        folders.append(folder)
        folder.chmod(mode)

    yield close
    for folder in folders:
        folder.chmod(OPEN)


def run(*words: object) -> tuple[int, list[str]]:
    done = forks.run(*words)
    return done.returncode, done.stderr.splitlines()


def held(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_a_folder_in_which_none_can_be_made(start: Start, closed: Close, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    closed(folder)
    code, lines = run(*start(folder / "run"))
    assert (code, len(lines)) == (2, 1), lines
    assert f"run directory '{folder}/run': Permission denied; name one that can" in lines[0]
    assert list(folder.iterdir()) == []


def test_one_that_is_there(start: Start, closed: Close, tmp_path: Path) -> None:
    """Before training, not at its first checkpoint; whether resumed or started again."""
    folder = tmp_path / "run"
    again = start(folder, max_epochs=2)
    assert run(*again)[0] == 0
    before = held(folder)
    closed(folder)
    for words in ([*RESUME, folder], again):
        code, lines = run(*words)
        assert (code, len(lines)) == (2, 1), lines
        assert f"run directory '{folder}': Permission denied" in lines[0]
        assert held(folder) == before


def test_one_that_loses_its_permission_while_a_run_trains(
    start: Start, closed: Close, tmp_path: Path
) -> None:
    """What was saved stays, and the run goes on once it may write again."""
    folder = tmp_path / "run"
    words = start(folder, max_epochs=EPOCHS)
    training = forks.start(*words)
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
    assert last.startswith(f"solo-ext: Permission denied: '{folder}/tiny-run-ep=")
    assert "give permission" in last
    kept = checkpoints(folder, previous=True)
    assert {one.path for one in saved} & {one.path for one in kept}
    assert kept[-1].epoch < EPOCHS - 1

    folder.chmod(OPEN)
    code, lines = run(*RESUME, folder)
    assert code == 0, lines
    assert checkpoints(folder)[-1].epoch == EPOCHS - 1
    assert not list(folder.glob(".*.saving"))


def test_files_that_may_not_be_read_and_folders_that_may_not_be_written(
    start: Start, closed: Close, tmp_path: Path
) -> None:
    whole, given = tmp_path / "whole", []
    assert run(*start(whole))[0] == 0
    (whole / "records.jsonl").touch()
    for number, (name, readers) in enumerate(READERS.items()):
        copy = Path(shutil.copytree(whole, tmp_path / str(number)))
        (file,) = [copy] if name == "." else copy.glob(name)
        closed(file, 0)
        words = {
            "resume": ["pretrain", "--resume", str(copy)],
            "eval": ["eval", "geometry", str(copy)],
            "export": ["export", str(copy), "--format=timm", f"--out={tmp_path / 'x'}"],
            "report": ["benchmark", "report", str(copy)],
        }
        given += [words[reader] for reader in readers]
    folder = tmp_path / "folder"
    folder.mkdir()
    closed(folder)
    exports = {"timm": "x", "safetensors": "x.safetensors"}
    for form, name in exports.items():
        given.append(["export", str(whole), f"--format={form}", f"--out={folder / name}"])
    for command in given:
        code, said = run("-c", BOUND, *command)
        assert (code, len(said)) == (2, 1), (command, said)
        assert said[0].startswith("solo-ext: "), command
        assert "Permission denied" in said[0], (command, said)
