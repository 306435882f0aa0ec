"""Command lines that are wrong, and what is expected of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TINY = (
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "optimizer.batch_size=64",
    "max_epochs=1",
)


class Mistake(NamedTuple):
    """A command line and fragments of the line that it must end with.

    Words and fragments may name places of the fixture ``places`` in braces.
    """

    words: tuple[str, ...]
    says: tuple[str, ...]


def of_config(name: str, *overrides: str, says: tuple[str, ...]) -> Mistake:
    """A tiny run of a shipped config with these overrides."""
    return Mistake(("pretrain", "--config-name", name, *TINY, *overrides), says)


def assert_one_line_that_helps(
    mistake: Mistake, command: Callable[..., Any], places: dict[str, str], folder: Path
) -> None:
    """The command ends with exit code 2 and one such line, and leaves every file as it was."""
    before = snapshot(folder, *map(Path, places.values()))
    result = command(*(word.format(**places) for word in mistake.words))
    assert (result.code, result.out) == (2, ""), (result.code, result.err)
    assert len(result.lines) == 1, result.err
    assert result.err.startswith("solo-ext"), result.err
    for fragment in mistake.says:
        assert fragment.format(**places) in result.lines[0], result.err
    assert result.noise == [], result.noise
    changed = snapshot(folder, *map(Path, places.values())).items() ^ before.items()
    # A run directory may have been made in it, and removed.
    left = sorted({str(path) for path, _ in changed if path != folder})
    assert not left, left


def snapshot(*roots: Path) -> dict[Path, int]:
    """Files and folders with the time they changed."""
    return {p: p.stat().st_mtime_ns for root in roots for p in (root, *root.rglob("*"))}
