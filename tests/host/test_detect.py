"""Tests of telling the generations of solo-learn apart."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from solo_ext.core.errors import UserError
from solo_ext.host import Host, HostError, detect, fingerprint

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
    only(plant(tmp_path, files))
    info = detect()
    assert (info.generation, info.version) == (generation, version)
    assert info.path == tmp_path / "solo"
    assert info.fingerprint == fingerprint(tmp_path / "solo")
    assert "solo" not in sys.modules, "looked at, not imported"


def test_a_checkout_does_not_take_the_version_of_an_installed_release(
    tmp_path: Path, only: Only
) -> None:
    checkout, installed = plant(tmp_path / "checkout", MAIN), plant(tmp_path / "site", RELEASE)
    metadata = installed / "solo_learn-1.0.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: solo-learn\nVersion: 1.0.2\n")
    only(checkout, installed)
    assert (detect().generation, detect().version) == ("main", "1.0.6")
    only(installed, checkout)
    assert (detect().generation, detect().version) == ("1.0.2", "1.0.2")


def test_the_content_decides_and_not_the_version(tmp_path: Path, only: Only) -> None:
    """Every commit of main calls itself 1.0.6, and so might a release."""
    plant(tmp_path, RELEASE)
    metadata = tmp_path / "solo_learn-1.0.6.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: solo-learn\nVersion: 1.0.6\n")
    only(tmp_path)
    assert (detect().generation, detect().version) == ("1.0.2", "1.0.6")


def test_none_is_an_error_that_says_how_to_install_either(tmp_path: Path, only: Only) -> None:
    only(tmp_path)
    with pytest.raises(HostError, match="not installed") as caught:
        detect()
    assert isinstance(caught.value, UserError)
    for words in INSTALLS:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        ("__init__.py",),
        ("__init__.py", "backbones/__init__.py"),
        ("__init__.py", "data/__init__.py"),
        ("__init__.py", "utils/__init__.py"),
    ],
)
def test_another_package_of_this_name_is_named(
    tmp_path: Path, only: Only, files: tuple[str, ...]
) -> None:
    only(plant(tmp_path, files))
    with pytest.raises(HostError, match="no solo-learn that solo_ext knows") as caught:
        detect()
    for words in (str(tmp_path / "solo"), *INSTALLS):
        assert words in str(caught.value)


@pytest.mark.parametrize("files", [("note.txt",), MAIN[1:], RELEASE[1:]])
def test_a_folder_named_solo_is_no_host(tmp_path: Path, only: Only, files: tuple[str, ...]) -> None:
    """Such a folder, a run directory for example, is importable as a namespace package."""
    only(plant(tmp_path, files))
    assert importlib.util.find_spec("solo") is not None
    with pytest.raises(HostError, match="not installed"):
        detect()


def test_a_folder_named_solo_does_not_hide_a_host_behind_it(tmp_path: Path, only: Only) -> None:
    folder, real = plant(tmp_path / "here", ("note.txt",)), plant(tmp_path / "there", MAIN)
    only(folder, real)
    assert detect().path == real / "solo"


def test_fingerprint_follows_names_and_contents_of_code(tmp_path: Path) -> None:
    package = plant(tmp_path, MAIN) / "solo"
    seen = [fingerprint(package)]

    def changed() -> bool:
        seen.append(fingerprint(package))
        return len(set(seen)) == len(seen)

    (package / "data" / "__init__.py").write_text("x = 1\n")
    assert changed()
    (package / "data" / "__init__.py").write_text("x = 2\n")
    assert changed()
    (package / "data" / "new.py").write_text("")
    assert changed()
    (package / "data" / "new.py").rename(package / "data" / "moved.py")
    assert changed()
    # The same bytes, elsewhere divided.
    (package / "data" / "moved.py").write_text("x = 2\n")
    (package / "data" / "__init__.py").write_text("")
    assert changed()


def test_fingerprint_ignores_times_places_and_other_files(tmp_path: Path) -> None:
    package = plant(tmp_path / "a", MAIN) / "solo"
    before = fingerprint(package)
    assert len(before) == 12
    os.utime(package / "__init__.py", (1, 1))
    (package / "notes.txt").write_text("x")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    assert fingerprint(package) == before
    assert fingerprint(plant(tmp_path / "b", tuple(reversed(MAIN))) / "solo") == before
