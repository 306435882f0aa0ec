"""Things that run code when they are read carelessly, and a mark that says whether they did."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class Payload:
    """What pickles to a call of ``exec`` that writes a file.

    Args:
        mark: the file.
    """

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return builtins.exec, (f"open({str(self.mark)!r}, 'w').close()",)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The file that a payload writes; that it is not there is checked after the test."""
    place = tmp_path / "code-was-run"
    yield place
    assert not place.exists(), "code in a file was run"


@pytest.fixture
def payload(mark: Path) -> Payload:
    """An object whose pickle runs code."""
    return Payload(mark)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that can be imported; that it was not is checked after the test."""
    name = "solo_ext_test_canary"
    folder = tmp_path / "packages" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def call(*args, **kwargs): raise SystemExit('called')\n")
    (folder / "inner.yaml").write_text("seed: 1\n")
    monkeypatch.syspath_prepend(folder.parent)
    sys.modules.pop(name, None)
    yield name
    assert sys.modules.pop(name, None) is None, "a config made Python import a package"
