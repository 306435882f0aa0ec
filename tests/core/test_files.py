"""How a file is written."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from solo_ext.core import files
from solo_ext.core.errors import UserError
from solo_ext.core.files import locked, write_text

WRITER = """
import sys
from pathlib import Path
from solo_ext.core.files import write_text
for _ in range(300):
    write_text(Path(sys.argv[1]), sys.argv[2] * 50_000)
"""


def test_two_processes_at_once_leave_one_of_their_texts(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    both = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), text]) for text in "ab"]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert file.read_text() in {"a" * 50_000, "b" * 50_000}
    assert list(tmp_path.iterdir()) == [file]


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    (tmp_path / "record.json").write_text("before")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text(tmp_path / "record.json", "after")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("", "another process; wait for it, remove '.*lock' if it has ended"),
        ("17\nelsewhere\n", "process 17 on 'elsewhere'; wait for it, remove '.*lock' if it has"),
    ],
    ids=["copied", "of a host that may be down"],
)
def test_a_file_system_without_locks(
    held: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is the lock there, and is named: it may be one that nobody will release."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    file = tmp_path / ".lock"
    file.write_text(held)
    with pytest.raises(UserError, match=says), locked(file, 0):
        pass
    file.write_text(f"{2**22 + 1}\n{socket.gethostname()}\n")
    with locked(file, 0):
        assert file.read_text().split()[0] == str(os.getpid()), "its process has ended"
