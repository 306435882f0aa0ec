"""Self-supervised methods that solo-learn lacks, selectable by name in its configs."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "register"]


def register() -> None:
    """Adds the methods and losses of this plugin, and of others', to solo-learn.

    Idempotent; see :func:`solo_ext.plugin.register`.
    """
    from solo_ext.plugin import register as fill

    fill()
