"""Self-supervised methods that solo-learn lacks, selectable by name in its configs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solo_ext.pretrained.exported import Exported

__all__ = ["__version__", "load_exported", "register"]
try:
    __version__ = version("solo-ext")
except PackageNotFoundError:
    # solo_ext runs from a checkout on the path that was never installed.
    __version__ = "0.0"


def load_exported(path: str | Path) -> Exported:
    """Loads a model that ``solo-ext export`` wrote.

    See :func:`solo_ext.pretrained.exported.load_exported`.
    """
    from solo_ext.pretrained.exported import load_exported as load

    return load(path)


def register() -> None:
    """Adds the methods and losses of this plugin and of third parties to solo-learn.

    Repeated calls change nothing; see :func:`solo_ext.plugin.register`.
    """
    from solo_ext.plugin import register as fill

    fill()
