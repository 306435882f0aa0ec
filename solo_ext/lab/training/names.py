"""Names of methods, without what methods import."""

from __future__ import annotations

from collections.abc import Iterable

from solo_ext.config.compose import shipped_configs
from solo_ext.core.errors import ConfigError, unknown_name
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS

OF_IMAGES = "images"
"""Folder of the shipped configs with which a run on a user's images begins."""
_EVERY_METHOD = "`solo-ext methods`"


def check_method_of_images(name: str) -> None:
    """Refuses a method that a run on a user's images cannot take.

    Raises:
        ConfigError: no config for a run on images is shipped for it.

    >>> check_method_of_images("simclr")
    """
    shipped = (config.split("/") for config in shipped_configs())
    known = [method for folder, method in shipped if folder == OF_IMAGES]
    if name not in known:
        raise unknown_name("--method", name, "method", known, all_in=_EVERY_METHOD)


def unknown_method(name: str, known: Iterable[str], generation: str) -> ConfigError:
    """Error for a method that the installed solo-learn, with the plugin, does not have.

    >>> unknown_method("mae", ["simclr"], "1.0.2").remedy
    'put a checkout of main on PYTHONPATH, or choose another method'
    """
    if name in BUILTIN_KWARGS:
        return ConfigError(
            "method",
            name,
            f"solo-learn {generation} does not have it, only its main branch does",
            "put a checkout of main on PYTHONPATH, or choose another method",
        )
    return unknown_name("method", name, "method", known, all_in=_EVERY_METHOD)
