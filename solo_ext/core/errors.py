"""What a user is told: errors of one line (what was wrong, what to do), and messages."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

_LONGEST_VALUE = 120
_ROOM = "make room, then {again}; what was written stays"
_OF_A_DISK = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "take a shorter name",
}
"""Errors of the system that whoever runs a command can mend, and how."""
# torch says this, in a RuntimeError, where a file cannot be written.
OF_TORCH = re.compile(r"PytorchStreamWriter|inline_container|iostream|Parent directory")


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
    """A process that a run needs is gone; a failure, and no mistake of the user's."""

    exit_code = 1


def in_one_line(command: Callable[[], int], again: str) -> int:
    """Runs a command; an error that its user can repair ends it with one line on standard error.

    Args:
        command: returns an exit code.
        again: how to go on after it was interrupted, or its disk was full.

    Returns:
        The exit code: 2 for a user's mistake and for a disk, 128 and a signal's number. Other
        failures raise.
    """
    try:
        return command()
    except KeyboardInterrupt:
        line, code = f"interrupted; {again}", 128 + signal.SIGINT
    except UserError as error:
        line, code = str(error), error.exit_code
    except Exception as error:
        trouble = disk_trouble(error, again)
        if trouble is None:
            raise
        line, code = str(trouble), trouble.exit_code
    print(f"solo-ext: {line}", file=sys.stderr)
    return code


def disk_trouble(error: BaseException, again: str) -> UserError | None:
    """Turns an error that a disk caused into a line that says what to do; ``None`` for others.

    Args:
        error: that was raised.
        again: how to go on once the disk takes more.
    """
    found = next((t for link in _chain(error) if (t := _trouble(link)) is not None), None)
    if found is None:
        return None
    what, remedy = found
    return UserError(f"{what}; {remedy.format(again=again)}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it."""
    following: BaseException | None = error
    while following is not None:
        yield following
        cause = following.__cause__
        context = None if following.__suppress_context__ else following.__context__
        following = cause or context


def disk_errno(error: BaseException) -> int | None:
    """The number of an error of a disk, ``None`` for another error.

    Args:
        error: of the system, or of a library that has no class of error for it, as safetensors.
    """
    if isinstance(error, OSError):
        return error.errno if error.errno in _OF_A_DISK else None
    text = str(error)
    return next((number for number in _OF_A_DISK if os.strerror(number) in text), None)


def _trouble(error: BaseException) -> tuple[str, str] | None:
    """What is wrong with a disk, and what to do; ``None`` for another error."""
    number = disk_errno(error)
    if number is not None:
        file = getattr(error, "filename", None)
        named = "" if file is None else f": {str(file)[:_LONGEST_VALUE]!r}"
        return os.strerror(number) + named, _OF_A_DISK[number]
    text = " ".join(str(error).split())[:_LONGEST_VALUE]
    if isinstance(error, RuntimeError) and OF_TORCH.search(text):
        return f"a file cannot be written ({text})", _ROOM
    return None


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
    # Reversed, so that of equal plain names the first wins.
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


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the time: progress bars replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """A program whose root logger prints, prints these too."""
        return not any(
            type(handler) is logging.StreamHandler and handler.level <= record.levelno
            for handler in logging.root.handlers
        )

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_messages() -> None:
    """Prints the messages of the ``solo_ext`` loggers from now on.

    Call it again after something else configured logging: Hydra's ``job_logging: disabled``, as in
    solo-learn's configs, disables every logger that exists.
    """
    logger = logging.getLogger("solo_ext")
    for name, known in logging.root.manager.loggerDict.items():
        if isinstance(known, logging.Logger) and name.partition(".")[0] == "solo_ext":
            known.disabled = False
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
