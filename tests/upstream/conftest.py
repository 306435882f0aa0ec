"""A tree of solo-learn's main, as it is and with all patches of ``upstream``."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from check import applied
from make import fresh_clone, make

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that SOLO_LEARN_ROOT names, or else the archive beside this project."""
    if named := os.environ.get("SOLO_LEARN_ROOT"):
        return Path(named)
    archives = sorted((ROOT.parent / "shared" / "hosts").glob("solo-learn-main-*.tar.gz"))
    if not archives:
        pytest.skip("SOLO_LEARN_ROOT names no checkout of main, and there is no archive of one")
    folder = tmp_path_factory.mktemp("main")
    with tarfile.open(archives[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def patched(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the tree with the whole series."""
    clone = fresh_clone(tree, tmp_path_factory.mktemp("patched") / "solo-learn")
    mails, lost = make(tree)
    assert not lost
    assert not applied(clone, mails.values())
    return clone
