"""Putting the plugin's methods and losses, and third parties', into solo-learn."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from solo_ext.errors import UserError
from solo_ext.losses import LOSSES
from solo_ext.registry import Entry, Registry

METHOD_GROUP = "solo_ext.methods"
LOSS_GROUP = "solo_ext.losses"


def register() -> None:
    """Fills ``solo.methods.METHODS`` and ``solo.losses``; loads the entry points of others.

    Idempotent. Entry points of the groups ``solo_ext.methods`` and ``solo_ext.losses`` name a
    class or a function; the entry point's name is what configs write.

    Raises:
        HostError: solo-learn is missing or cannot be imported.
        UserError: a name is already taken, or an entry point cannot be loaded.
    """
    from solo_ext import host
    from solo_ext.methods import METHODS

    loaded = host.load()
    _load_entry_points(METHOD_GROUP, METHODS)
    _load_entry_points(LOSS_GROUP, LOSSES)
    for method in METHODS.entries():
        _put(loaded.methods, method, "method")
    losses = loaded.solo.losses
    for loss in LOSSES.entries():
        _put(vars(losses), loss, "loss")
        if loss.name not in losses.__all__:
            losses.__all__.append(loss.name)


def _put(table: dict[str, Any], entry: Entry[Any], kind: str) -> None:
    held = table.setdefault(entry.name, entry.target)
    if held is not entry.target:
        raise UserError(
            f"{kind} {entry.name!r} of {entry.origin} would shadow solo-learn's own; rename it"
        )


def _load_entry_points(group: str, registry: Registry[Any]) -> None:
    for point in entry_points(group=group):
        try:
            target = point.load()
            origin = point.dist.name if point.dist else point.module
            registry.add(Entry(point.name, target, origin=origin))
        except Exception as error:
            raise UserError(
                f"entry point {point.name!r} = {point.value!r} of group {group} cannot be loaded: "
                f"{error}; mend or uninstall that package"
            ) from error
