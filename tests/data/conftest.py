"""A cache of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder; nothing makes it but what is tested."""
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
