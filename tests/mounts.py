"""Small file systems of their own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted for the block; the test is skipped where it may not be.

    Args:
        place: of the folder that is made.
        options: of tmpfs, such as ``size=1m`` or ``nr_inodes=8``.
    """
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Writes a file that takes all room there is."""
    file = disk / "ballast"
    # Without an inode there is no file to fill.
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as held:
        while held.write(b"x" * 4096):
            pass
    return file
