"""``solo-ext data convert``: what it says, its mistakes, and a process that is killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import forks

Command = Callable[..., Any]


def test_images_to_shards(command: Command, images: Path, tmp_path: Path) -> None:
    words = ("data", "convert", f"data.train_path={images}", "--out", str(tmp_path / "out"))
    done = command(*words, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {
        "images": 48,
        "shards": 1,
        "unreadable": [],
        "out": str(tmp_path / "out"),
    }
    done = command(*words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "holds shards already; name another folder with --out" in done.err


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "data.train_path=null: no path"),
        (("data.train_path=nowhere",), "data.train_path='nowhere': no such folder"),
        (("--split", "val", "data.val_path=nowhere"), "data.val_path='nowhere': no such folder"),
        (("data.train_pat=x",), "data.train_pat='x': unknown key; did you mean 'train_path'?"),
        (("optimizer.lr=1",), "optimizer: only settings of data are read here"),
        (("--shard-mb", "0"), "'0' is not an integer above 0"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], problem: str, command: Command, tmp_path: Path
) -> None:
    done = command("data", "convert", "--out", str(tmp_path / "out"), *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert problem in done.err


@pytest.mark.fault
@pytest.mark.slow
def test_kill_9(tmp_path: Path) -> None:
    """Again and again, until it is done."""
    rng = np.random.default_rng(0)
    for index in range(60):
        place = tmp_path / "folder" / "ab"[index % 2] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(place)
    words = [*forks.SOLO_EXT, "data", "convert", f"data.train_path={tmp_path}/folder"]
    words += ["--shard-mb", "1", "--out"]
    assert forks.run(*words, tmp_path / "whole").returncode == 0
    parts, killed = tmp_path / "parts", 0
    while not (parts / "index.json").exists():
        before = len(list(parts.glob("*.mds")))
        process = forks.start(*words, parts)
        while process.poll() is None and len(list(parts.glob("*.mds"))) < before + 3:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        assert process.wait(60) in (0, -signal.SIGKILL)
    assert killed > 1
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in parts.iterdir()} == whole
