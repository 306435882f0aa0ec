"""Files and folders that appear whole or not at all, and take no other's place."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from solo_ext.core.errors import UserError
from solo_ext.core.files import writing


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which becomes ``target`` when the block ends well.

    Args:
        target: its folder exists. What is there stays; the same content is no mistake.

    Raises:
        UserError: ``target`` holds something else.
    """
    scratch = target.parent / f".{target.name}.saving"
    _remove(scratch)
    try:
        with writing(target):
            yield scratch
        if not target.exists():
            os.replace(scratch, target)
        elif not _same(scratch, target):
            raise UserError(
                f"{str(target)!r} is there already with other content; remove it, or write "
                "elsewhere"
            )
    finally:
        _remove(scratch)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _same(new: Path, old: Path) -> bool:
    """Whether all that is new is there already; what lies beside it is not looked at."""
    if new.is_dir() and old.is_dir():
        return all(_same(inner, old / inner.name) for inner in new.iterdir())
    return new.is_file() and old.is_file() and filecmp.cmp(new, old, shallow=False)
