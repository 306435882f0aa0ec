"""Which code a record was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from solo_ext import __version__


def code_version() -> dict[str, Any]:
    """``version``; in a git checkout also ``commit``, and ``changed``: it differs from that."""
    root = Path(__file__).resolve().parents[3]
    found: dict[str, Any] = {"version": __version__}
    if not (root / ".git").exists():
        return found

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "solo_ext", "configs")
        return {**found, "commit": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return found
