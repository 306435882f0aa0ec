"""Errors that a user can mend, each one line: what was wrong, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_VALUE = 120


class UserError(Exception):
    """A mistake of the user's, printed as one line.

    Attributes:
        exit_code: of the command that it ends.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A configuration value that cannot be used.

    Args:
        key: dotted key of the value, for example ``optimizer.lr``.
        value: what was given; ``None`` and booleans print as YAML writes them.
        problem: what is wrong with it.
        remedy: what is allowed, or what to do.
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(f"{key}={_shown(value)}: {problem}" + (f"; {remedy}" if remedy else ""))


class HostError(UserError):
    """solo-learn is missing, or is of a generation that cannot do what was asked."""


class StoppedBySignal(UserError):
    """A run that a signal ended, after it wrote down where it stands.

    Args:
        message: what was kept, and how to go on.
        signal: number of the signal.
    """

    def __init__(self, message: str, signal: int) -> None:
        self.signal = signal
        self.exit_code = 128 + signal
        super().__init__(message)


class ProcessLost(UserError):
    """A run whose processes wait for one that is gone; a failure, and no mistake of the user's."""

    exit_code = 1


def nearest(name: str, valid: Iterable[str], *, show: int = 12) -> str:
    """Says which valid name is closest to ``name`` and which others there are.

    Args:
        name: what was written; case and hyphens do not count.
        valid: the names that would have been accepted.
        show: how many of them are listed at the most; 0 lists none.

    Returns:
        For example ``did you mean 'simclr'? allowed: byol, dino, simclr``.
    """
    names = sorted(valid)
    # The first of equal ones wins.
    plain = {_plain(n): n for n in reversed(names)}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.5)
    guess = f"did you mean {plain[close[0]]!r}?" if close else ""
    if not show:
        return guess
    listed = ", ".join(names[:show]) + (f", ... ({len(names)} in all)" if len(names) > show else "")
    return f"{guess} allowed: {listed}".strip() if names else "nothing is allowed here"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
