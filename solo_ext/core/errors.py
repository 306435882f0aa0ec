"""Messages to users, and errors of one line: what was wrong, and what to do."""

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
"""System errors that the user of a command can fix, and how."""
# torch reports a file that cannot be written as a RuntimeError with one of these words.
OF_TORCH = re.compile(r"PytorchStreamWriter|inline_container|iostream|Parent directory")


class UserError(Exception):
    """A mistake of the user, printed as one line.

    Attributes:
        exit_code: exit code of the command that it ends.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A configuration value that cannot be used.

    Args:
        key: dotted key of the value, for example ``optimizer.lr``.
        value: the value given; ``None`` and booleans print as in YAML.
        problem: what is wrong with it.
        remedy: what is allowed, or what to do.
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(f"{key}={_shown(value)}: {problem}" + (f"; {remedy}" if remedy else ""))


class HostError(UserError):
    """solo-learn is missing, or its generation cannot do what was asked."""


class StoppedBySignal(UserError):
    """A signal ended a run after it saved its state.

    Args:
        message: what was saved, and how to continue.
        signal: number of the signal.
    """

    def __init__(self, message: str, signal: int) -> None:
        self.signal = signal
        self.exit_code = 128 + signal
        super().__init__(message)


class ProcessLost(UserError):
    """A process that a run needs has died: a failure, not a mistake of the user."""

    exit_code = 1


def in_one_line(command: Callable[[], int], again: str) -> int:
    """Runs a command; prints an error that the user can fix as one line on standard error.

    Args:
        command: returns an exit code.
        again: how to continue after an interruption or a full disk.

    Returns:
        The exit code: 2 for a user error or a disk's error, 128 plus the number of a signal. Other
        errors are raised.
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
    """Turns an error caused by a disk into one line that says what to do; ``None`` for others.

    Args:
        error: the error raised.
        again: how to continue once the disk is writable again.
    """
    found = next((t for link in _chain(error) if (t := _trouble(link)) is not None), None)
    if found is None:
        return None
    what, remedy = found
    return UserError(f"{what}; {remedy.format(again=again)}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and the chain of its causes."""
    following: BaseException | None = error
    while following is not None:
        yield following
        cause = following.__cause__
        context = None if following.__suppress_context__ else following.__context__
        following = cause or context


def disk_errno(error: BaseException) -> int | None:
    """The ``errno`` of a disk's error; ``None`` for another error.

    Args:
        error: from the system, or from a library such as safetensors that only reports it as text.
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
    """Says which valid name is closest to ``name``, and lists others.

    Args:
        name: the name given; case and hyphens do not count.
        valid: the names that are accepted.
        show: how many of them to list at most; 0 lists none.

    Returns:
        For example ``did you mean 'simclr'? allowed: byol, dino, simclr``.
    """
    names = sorted(valid)
    # Reversed, so that among names that are equal when plain, the first wins.
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
    """Writes to the current ``sys.stderr``, which progress bars replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drops records that a handler of the root logger already prints."""
        return not any(
            type(handler) is logging.StreamHandler and handler.level <= record.levelno
            for handler in logging.root.handlers
        )

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_messages() -> None:
    """Prints the messages of the ``solo_ext`` loggers from now on.

    Call it again after other code configured logging: Hydra's ``job_logging: disabled``, as in
    solo-learn's configs, disables every existing logger.
    """
    logger = logging.getLogger("solo_ext")
    for name, known in logging.root.manager.loggerDict.items():
        if isinstance(known, logging.Logger) and name.partition(".")[0] == "solo_ext":
            known.disabled = False
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
