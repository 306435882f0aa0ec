"""Files that rows name, and whether they are still those that were written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_KEYS = ("picture", "page", "saved")


def files_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Paths, in the folder of the rows, of pictures, pages, weights and further files."""
    named = [[*(row.get(k) for k in _KEYS), *(row.get("files") or ())] for row in rows]
    return list(dict.fromkeys(str(file) for files in named for file in files if file))


def file_digest(file: Path) -> str | None:
    """SHA-256 of a file; ``None`` where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def is_unchanged(file: Path, digest: str | None) -> bool:
    """Whether a file has the digest that it was written with."""
    return digest is not None and file_digest(file) == digest
