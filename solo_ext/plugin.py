"""Adds the methods and losses of this plugin, and of third parties, to solo-learn."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import entry_points
from typing import Any

from solo_ext.core.errors import UserError
from solo_ext.core.registry import Entry, Registry
from solo_ext.losses import LOSSES

METHOD_GROUP = "solo_ext.methods"
LOSS_GROUP = "solo_ext.losses"
logger = logging.getLogger(__name__)


class Unavailable:
    """Placeholder for a method or loss that could not be imported; calling it raises ``message``.

    >>> Unavailable("method 'pcl' cannot be imported: no module named 'timm'")()
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: method 'pcl' cannot be imported: no module named 'timm'
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(self.message)


def register() -> None:
    """Adds our and other packages' methods and losses to solo-learn's ``METHODS`` and ``losses``.

    Repeated calls change nothing. Each entry point of the groups ``solo_ext.methods`` and
    ``solo_ext.losses`` names a class or a function, which configs select by the entry point's name.
    If solo-learn has a method of the same name, solo-learn's is kept and the other one is called
    ``<origin>/<name>``, such as ``solo_ext/pcl``. A method or loss that cannot be loaded causes one
    warning, and an error when it is selected.

    Raises:
        UserError: solo-learn is missing or cannot be imported.

    >>> from solo_ext import host
    >>> register()
    >>> "pcl" in host.load().methods, "nt_xent_loss_func" in host.load().solo.losses.__all__
    (True, True)
    """
    from solo_ext import host
    from solo_ext.host.patches import PLUGIN_METHODS
    from solo_ext.methods import METHODS, load_all

    loaded = host.load()
    for name, error in load_all().items():
        _unavailable(METHODS, name, f"method {name!r} cannot be imported: {error}", "solo_ext")
    load_entry_points(METHOD_GROUP, METHODS)
    load_entry_points(LOSS_GROUP, LOSSES)
    for method in METHODS.values():
        alias = f"{method.origin}/{method.name}"
        if not _put(loaded.methods, method, f"method {method.name!r}", alias):
            loaded.methods[alias] = method.target
        PLUGIN_METHODS[id(method.target)] = method.target
    losses = loaded.solo.losses
    for loss in LOSSES.values():
        _put(vars(losses), loss, f"loss {loss.name!r}", f"{loss.target.__module__}.{loss.name}")
        if loss.name not in losses.__all__:
            losses.__all__.append(loss.name)


def _put(table: dict[str, Any], entry: Entry[Any], what: str, otherwise: str) -> bool:
    """Adds an entry, or warns if its name is taken; returns whether the table has the entry."""
    own = table.setdefault(entry.name, entry.target) is entry.target
    if not own:
        _tell(f"solo-learn has a {what} of its own, which stays; {entry.origin}'s is {otherwise}")
    return own


def load_entry_points(group: str, registry: Registry[Any]) -> None:
    """Adds other distributions' entry points to a registry; warns of those that cannot be loaded.

    >>> losses = Registry[Any]("loss")
    >>> load_entry_points("a.group.of.nobody", losses)
    >>> len(losses)
    0
    """
    for point in entry_points(group=group):
        origin = point.dist.name if point.dist else point.module.partition(".")[0]
        try:
            target = point.load()
            if not (isinstance(target, type) if group == METHOD_GROUP else callable(target)):
                raise TypeError(f"it is {target!r}")
            registry.add(Entry(point.name, target, origin=origin))
        except (Exception, SystemExit) as error:
            problem = (
                f"entry point {point.name!r} = {point.value!r} of group {group} cannot be loaded: "
                f"{error}; mend or uninstall {origin}"
            )
            _unavailable(registry, point.name, problem, origin)


def _unavailable(registry: Registry[Any], name: str, problem: str, origin: str) -> None:
    if name not in registry:
        registry.add(Entry(name, Unavailable(problem), origin=origin))
    _tell(problem)


@functools.cache
def _tell(problem: str) -> None:
    """Warns once per process, because every command and every test calls ``register``."""
    logger.warning(problem)
