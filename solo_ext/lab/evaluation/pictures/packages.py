"""Packages that only pictures need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from solo_ext.core.errors import UserError


def viz_package(name: str) -> Any:
    """Imports a package of the extra ``viz``.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        raise UserError(
            f"this needs {name.partition('.')[0]}, which is not installed; "
            "pip install 'solo-ext[viz]'"
        ) from None
