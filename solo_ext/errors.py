"""Errors that a user can mend, each one line: what was wrong, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's, printed as one line and answered with exit code 2."""


class ConfigError(UserError):
    """A configuration value that cannot be used.

    Args:
        key: dotted key of the value, for example ``optimizer.lr``.
        value: what was given; ``None`` prints as ``null``, as YAML writes it.
        problem: what is wrong with it.
        remedy: what is allowed, or what to do.
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        shown = "null" if value is None else repr(value)
        super().__init__(f"{key}={shown}: {problem}" + (f"; {remedy}" if remedy else ""))


class HostError(UserError):
    """solo-learn is missing, or is of a generation that cannot do what was asked."""


def nearest(name: str, valid: Iterable[str], *, show: int = 12) -> str:
    """Says which valid name is closest to ``name`` and which others there are.

    Args:
        name: what was written.
        valid: the names that would have been accepted.
        show: how many of them are listed at the most.

    Returns:
        For example ``did you mean 'simclr'? allowed: byol, dino, simclr``.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(names[:show]) + (f", ... ({len(names)} in all)" if len(names) > show else "")
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}allowed: {listed}" if names else f"{guess}nothing is allowed here"
