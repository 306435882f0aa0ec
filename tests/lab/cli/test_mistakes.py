"""Wrong configs and command lines end with one line that helps, and leave nothing behind."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from solo_ext import host
from solo_ext.methods import load_all
from tests.lab.cli.conftest import TINY, Command

load_all()
TABLE = Path(__file__).with_name("mistakes.txt")
HOST = host.detect().generation
PROJECTOR = ("proj_hidden_dim=8", "proj_output_dim=8")


def cases() -> list[Any]:
    """The lines of ``mistakes.txt``: words of ``solo-ext``, and fragments of the answer."""
    found, heading, generation = [], "", ""
    for line in TABLE.read_text().replace("\n    ", " ").splitlines():
        if line.startswith("["):
            heading, _, generation = line.strip("[]").partition(" on ")
        elif line and not line.startswith("#") and generation in ("", HOST) and not pointless(line):
            given, *says = line.split(" | ")
            words = [w for word in shlex.split(given) if word != "-" for w in expanded(word)]
            answer = [longer(fragment) for fragment in says]
            found.append(
                pytest.param([*beginning(heading), *words], answer, id=f"{heading} {given}")
            )
    return found


def pointless(line: str) -> bool:
    """Whether it asks for a package that is there."""
    return any(name in line and find_spec(name) for name in ("wandb", "tensorboard"))


def beginning(heading: str) -> list[str]:
    """Words that a heading stands for."""
    kind, _, name = heading.partition(" ")
    if kind == "run":
        return ["pretrain", "--config-name", name, *TINY]
    return [] if kind == "solo-ext" else heading.split()


def expanded(word: str) -> list[str]:
    """The words that one of the table stands for."""
    name, _, value = word.partition("=")
    if name != "builtin":
        return [longer(word)]
    sizes = [f"+method_kwargs.{size}" for size in PROJECTOR]
    return [f"method={value}", "~method_kwargs", *sizes]


def longer(text: str) -> str:
    return text.replace("mk.", "method_kwargs.")


@pytest.fixture(scope="module", autouse=True)
def _images_stay(places: dict[str, str]) -> Iterator[None]:
    """There are too many to look at them after every mistake."""
    before = snapshot(Path(places["digits"]))
    yield
    assert snapshot(Path(places["digits"])) == before


@pytest.mark.parametrize(("words", "says"), cases())
def test_one_line_that_helps(
    words: list[str], says: list[str], command: Command, places: dict[str, str], tmp_path: Path
) -> None:
    """Exit code 2, one line on standard error, and every file as it was."""
    roots = [tmp_path, *(Path(place) for name, place in places.items() if name != "digits")]
    before = snapshot(*roots)
    result = command(*(word.format(**places) for word in words))
    assert (result.code, result.out) == (2, ""), (result.code, result.err)
    assert len(result.lines) == 1, result.err
    assert result.err.startswith("solo-ext"), result.err
    for fragment in says:
        assert fragment.format(**places) in result.lines[0], result.err
    assert result.noise == [], result.noise
    changed = snapshot(*roots).items() ^ before.items()
    # A run directory may have been made in the folder, and removed.
    assert sorted({path for path, _ in changed if path != str(tmp_path)}) == []


def snapshot(*roots: Path) -> dict[str, int]:
    """Files and folders with the time they changed."""
    found = [path for root in roots for path in (root, *root.rglob("*"))]
    return {str(path): path.stat().st_mtime_ns for path in found}


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The latest mistake there is: model and loggers exist, the Trainer refuses."""
    given = ("pretrain", "--config-name", "digits/debiased", *TINY, "barebones=true")
    words = [sys.executable, "-m", "solo_ext.lab.cli.main", *given]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("solo-ext: ")
    assert list(tmp_path.iterdir()) == []
