"""Tests of telling the generations of solo-learn apart."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from solo_ext.core.errors import UserError
from solo_ext.host import Host, detect, fingerprint

MAIN = ("__init__.py", "backbones/__init__.py", "data/__init__.py", "utils/__init__.py")
RELEASE = ("__init__.py", "utils/__init__.py", "utils/backbones.py")
Only = Callable[..., None]
INSTALLS = ("pip install --no-deps solo-learn==1.0.2", "git clone", "PYTHONPATH")


def plant(root: Path, files: tuple[str, ...]) -> Path:
    """Writes empty files of a package ``solo`` below ``root``."""
    for name in files:
        file = root / "solo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    return root


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Only]:
    """``only(*folders)``: a process that finds packages in these folders and nowhere else."""

    def see(*folders: Path) -> None:
        for name in [n for n in sys.modules if n == "solo" or n.startswith("solo.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(f) for f in folders])
        importlib.invalidate_caches()

    yield see
    importlib.invalidate_caches()


def test_the_installed_host_is_told_as_what_was_loaded(loaded: Host) -> None:
    info = detect()
    assert info == loaded.info
    assert info.path == Path(loaded.solo.__file__).parent
    assert (info.generation == "main") == (info.path / "backbones").is_dir()


@pytest.mark.parametrize(
    ("files", "generation", "version"), [(MAIN, "main", "1.0.6"), (RELEASE, "1.0.2", "1.0.2")]
)
def test_generation_by_what_is_there(
    tmp_path: Path, only: Only, files: tuple[str, ...], generation: str, version: str
) -> None:
    """A checkout before an installed release counts, and the other way round."""
    other = plant(tmp_path / "other", RELEASE if files == MAIN else MAIN)
    only(plant(tmp_path, files), other)
    info = detect()
    assert (info.generation, info.version) == (generation, version)
    assert info.path == tmp_path / "solo"
    assert info.fingerprint == fingerprint(tmp_path / "solo")
    assert "solo" not in sys.modules, "looked at, not imported"


UNKNOWN = "no solo-learn that solo_ext knows"


@pytest.mark.parametrize(
    ("files", "says"),
    [((), "not installed"), *((files, UNKNOWN) for files in (MAIN[:1], MAIN[:2], RELEASE[:2]))],
)
def test_no_host_is_an_error_that_says_how_to_install_either(
    tmp_path: Path, only: Only, files: tuple[str, ...], says: str
) -> None:
    """Another package of this name is named."""
    only(plant(tmp_path, files))
    with pytest.raises(UserError, match=says) as caught:
        detect()
    for words in (*INSTALLS, *([str(tmp_path / "solo")] if files else [])):
        assert words in str(caught.value)


def test_a_folder_named_solo_does_not_hide_a_host_behind_it(tmp_path: Path, only: Only) -> None:
    """Such a folder, a run directory for example, is importable as a namespace package."""
    folder, real = plant(tmp_path / "here", ("note.txt",)), plant(tmp_path / "there", MAIN)
    only(folder)
    assert importlib.util.find_spec("solo") is not None
    with pytest.raises(UserError, match="not installed"):
        detect()
    only(folder, real)
    assert detect().path == real / "solo"


def test_fingerprint_follows_names_and_contents_of_code(tmp_path: Path) -> None:
    package = plant(tmp_path, MAIN) / "solo"
    file, new = package / "data" / "__init__.py", package / "data" / "new.py"
    seen = [fingerprint(package)]
    for change in (
        lambda: file.write_text("x = 1\n"),
        lambda: new.write_text(""),
        lambda: new.rename(new.with_name("moved.py")),
        # The same bytes, elsewhere divided.
        lambda: (file.write_text(""), new.with_name("moved.py").write_text("x = 1\n")),
    ):
        change()
        seen.append(fingerprint(package))
    assert len(set(seen)) == len(seen)
    os.utime(package / "__init__.py", (1, 1))
    (package / "notes.txt").write_text("x")
    assert fingerprint(package) == seen[-1]
