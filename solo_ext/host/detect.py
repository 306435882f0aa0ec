"""Which solo-learn is installed, found out without importing it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from solo_ext.core.errors import HostError

INSTALL = (
    "install the release with `pip install --no-deps solo-learn==1.0.2` (or `uv sync`), or take "
    "the main branch: `git clone https://github.com/vturrisi/solo-learn` and put the checkout on "
    "PYTHONPATH (`export PYTHONPATH=/path/to/solo-learn`)"
)


@dataclass(frozen=True)
class HostInfo:
    """An installed solo-learn.

    Attributes:
        generation: ``main`` or ``1.0.2``.
        version: what it calls itself; every commit of main says 1.0.6.
        path: folder of the package ``solo``.
        fingerprint: first 12 hex digits of the SHA-256 of its Python files.
    """

    generation: Literal["main", "1.0.2"]
    version: str
    path: Path
    fingerprint: str


def detect() -> HostInfo:
    """Finds solo-learn and tells its generation by what is there.

    Raises:
        HostError: none is installed, or one that is neither generation.
    """
    spec = importlib.util.find_spec("solo")
    if spec is None or spec.origin is None:
        raise HostError(f"solo-learn is not installed; {INSTALL}")
    path = Path(spec.origin).resolve().parent
    if (path / "backbones").is_dir() and (path / "data").is_dir():
        return HostInfo("main", _version(path, "1.0.6"), path, fingerprint(path))
    if (path / "utils" / "backbones.py").is_file():
        return HostInfo("1.0.2", _version(path, "1.0.2"), path, fingerprint(path))
    raise HostError(f"the package `solo` in {path} is no solo-learn that solo_ext knows; {INSTALL}")


def fingerprint(package: Path) -> str:
    """Digest of a package's Python files: names and contents, in sorted order."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(package: Path, otherwise: str) -> str:
    """Version of the distribution that owns ``package``; a checkout belongs to none."""
    try:
        found = importlib.metadata.distribution("solo-learn")
    except importlib.metadata.PackageNotFoundError:
        return otherwise
    owned = Path(str(found.locate_file("solo"))).resolve()
    return found.version if owned == package else otherwise
