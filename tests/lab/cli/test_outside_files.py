"""Files of a run that somebody has damaged, replaced or edited, and all commands that read them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cli.conftest import Command, Outcome

pytestmark = [pytest.mark.fault, pytest.mark.slow]
COMMANDS = {
    "resume": ("pretrain", "--resume", "{run}"),
    "knn": ("eval", "knn", "{run}"),
    "suite": ("eval", "suite", "{run}", "protocols=[knn]"),
    "export": ("export", "{run}", "--format=timm"),
}
ARGS: dict[str, Any] = {
    "short-mean": ("augmentations", [{"crop_size": 32, "mean": [0.5], "std": [0.2]}]),
    "huge-crop": ("augmentations", [{"crop_size": 10**12}]),
    "name": ("name", {"a": 1}),
}


def bytes_of(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def bomb(file: Path) -> None:
    """511 bytes that stand for 10^9 values."""
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    file.write_text("\n".join(lines))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "latin": bytes_of(b'{"name": "caf\xe9", "step": 1}\n'),
    "cut": bytes_of(b'{"step": 1, "name": "\xe2\x82'),
    "types": bytes_of(b'{"step": "x", "seconds": "y", "images": [], "epoch": {}}\n'),
    "number": bytes_of(b"3"),
    "empty": bytes_of(b""),
    "null-bytes": bytes_of(b"\0" * 64),
    "pipe": os.mkfifo,
    "endless": endless,
    "folder": Path.mkdir,
    "nested": bytes_of(b"[" * 100_000),
    "bomb": bomb,
}
FILES = {
    "metrics.jsonl": ["resume"],
    "epochs.jsonl": ["resume"],
    "config.yaml": ["resume"],
    "environment.json": ["resume"],
    "args.json": ["knn", "export"],
    "*.ckpt": list(COMMANDS),
}
"""Files of a run, and the commands that read them."""
PLACES = {"eval_knn.json": "knn", "eval_suite.json": "suite", "features": "knn"}
"""What commands write."""


def check(result: Outcome) -> None:
    """Success, or one line; warnings may come before it."""
    assert result.code in (0, 2), result.err
    assert "Traceback" not in result.err + result.out, result.err
    said = [line for line in result.lines if line.startswith("solo-ext: ")]
    assert len(said) == (result.code != 0), result.err
    assert "details in" not in result.err, result.err


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged(how: str, name: str, own_run: Path, command: Command) -> None:
    (file,) = own_run.glob(name)
    file.unlink()
    DAMAGES[how](file)
    for reader in FILES[name]:
        check(command(*(word.format(run=own_run) for word in COMMANDS[reader])))


@pytest.mark.parametrize("case", ARGS)
def test_settings_of_wrong_types(case: str, own_run: Path, command: Command) -> None:
    file = own_run / "args.json"
    key, value = ARGS[case]
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    for reader in ("knn", "export"):
        check(command(*(word.format(run=own_run) for word in COMMANDS[reader])))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["folder", "pipe", "endless"])
def test_in_the_way(place: str, how: str, own_run: Path, command: Command) -> None:
    """What a command would write is there already, as something else."""
    file = own_run / place
    shutil.rmtree(file, ignore_errors=True)
    DAMAGES[how](file)
    check(command(*(word.format(run=own_run) for word in COMMANDS[PLACES[place]])))


def test_a_bomb_in_a_file_of_the_defaults(tmp_path: Path, command: Command) -> None:
    bomb(tmp_path / "more.yaml")
    (tmp_path / "mine.yaml").write_text("defaults: [/solo_ext/digits/simclr, more, _self_]\n")
    result = command("pretrain", "--config-path", str(tmp_path), "--config-name", "mine")
    check(result)
    assert "more.yaml" in result.err
    assert "aliases" in result.err
