"""Errors that tell a user in one line what was wrong and what to do, and log messages."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

LONGEST_VALUE = 120
"""Most characters of a value in a message."""
_ROOM = "make room, then {again}; what was written stays"
_IN_THE_WAY = "something else of that name is in the way: remove it, or name another place"
_DENIED = "give permission, or name another place"
_HANDLES = "raise the limit (`ulimit -n`), or take fewer data.num_workers"
_OF_A_DISK = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.EMFILE: _HANDLES,
    errno.ENFILE: _HANDLES,
}
_OF_A_PATH = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
}
_OF_THE_SYSTEM = _OF_A_DISK | _OF_A_PATH
"""Error numbers of the system that the user of a command can fix, and how."""
# torch reports a file that cannot be written as a RuntimeError with one of these words.
_OF_TORCH = re.compile(r"PytorchStreamWriter|inline_container|iostream|Parent directory")


class UserError(Exception):
    r"""A mistake of the user, printed as one line; the command then exits with ``exit_code``.

    >>> print(UserError("no such folder;\n    give another"))
    no such folder; give another
    >>> UserError.exit_code
    2
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A value of a config that cannot be used; ``remedy`` is what is allowed or what to do.

    >>> print(ConfigError("optimizer.lr", None, "this key is required", "give it a value"))
    optimizer.lr=null: this key is required; give it a value
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(f"{key}={_shown(value)}: {problem}" + (f"; {remedy}" if remedy else ""))


class NoSuchRun(UserError):
    """There is nothing where a run directory or a checkpoint should be.

    >>> print(NoSuchRun("runs/pcl"))
    'runs/pcl': no such run directory or checkpoint
    """

    def __init__(self, path: object) -> None:
        super().__init__(f"{str(path)!r}: no such run directory or checkpoint")


class StoppedBySignal(UserError):
    """The signal with this number ended a run after the run had saved its state.

    >>> StoppedBySignal("saved; run the command again to continue", signal=15).exit_code
    143
    """

    def __init__(self, message: str, signal: int) -> None:
        self.signal = signal
        self.exit_code = 128 + signal
        super().__init__(message)


class ProcessLost(UserError):
    """A process that a run needs has died, which is a failure and not a mistake of the user.

    >>> ProcessLost("a worker of the data loader was killed").exit_code
    1
    """

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty.

    >>> first_line(ValueError("not today\\nbut tomorrow")), first_line(KeyError())
    ('not today', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def disk_trouble(error: BaseException, again: str) -> UserError | None:
    """Turns a disk error into a UserError that says what to do; ``None`` for other errors.

    ``again`` is how to continue once the disk can be written.

    >>> print(disk_trouble(OSError(errno.ENOSPC, "", "last.ckpt"), "run it again"))
    No space left on device: 'last.ckpt'; make room, then run it again; what was written stays
    >>> disk_trouble(ValueError("no disk"), "run it again")
    """
    for link in _chain(error):
        number, text = disk_errno(link), " ".join(str(link).split())[:LONGEST_VALUE]
        if number is not None:
            file = getattr(link, "filename", None)
            named = "" if file is None else f": {str(file)[:LONGEST_VALUE]!r}"
            remedy = _OF_THE_SYSTEM[number].format(again=again)
            return UserError(f"{os.strerror(number)}{named}; {remedy}")
        if isinstance(link, RuntimeError) and _OF_TORCH.search(text):
            return UserError(f"a file cannot be written ({text}); {_ROOM.format(again=again)}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and the chain of its causes."""
    following: BaseException | None = error
    while following is not None:
        yield following
        cause = following.__cause__
        context = None if following.__suppress_context__ else following.__context__
        following = cause or context
        if cause is None and isinstance(context, OSError) and context.errno in _OF_A_PATH:
            # Code often tries a path and handles the error; what fails afterwards has other causes.
            return


def disk_errno(error: BaseException) -> int | None:
    """The ``errno`` of a disk error, even if a library reports it as text; ``None`` for others.

    >>> disk_errno(RuntimeError("write failed: No space left on device")) == errno.ENOSPC
    True
    >>> caught = "Caught OSError in DataLoader worker process 0. [Errno 28] No space left on device"
    >>> disk_errno(OSError(caught)) == errno.ENOSPC
    True
    """
    # An error of a loader's worker arrives as its type with a new text, and no errno.
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _OF_THE_SYSTEM else None
    text = str(error)
    return next((number for number in _OF_THE_SYSTEM if os.strerror(number) in text), None)


_NEAREST = 5


def suggest_name(name: str, valid: Iterable[str], *, show: int = 12, all_in: str = "") -> str:
    """Says which valid name is closest to ``name``, and lists them: if over ``show``, the nearest.

    At most five are listed then, and ``all_in`` says where all of them stand. Case is ignored, and
    a hyphen equals an underscore.

    >>> suggest_name("sim-clr", ["byol", "dino", "simclr"])
    "did you mean 'simclr'? allowed: byol, dino, simclr"
    >>> suggest_name("sim-clr", ["byol", "dino", "simclr", "simsiam"], show=2)
    "did you mean 'simclr'? allowed: simclr, simsiam, ... (4 in all)"
    """
    names = sorted(valid)
    # Reversed, so that the first of several names with the same plain form wins.
    plain = {n.lower().replace("-", "_"): n for n in reversed(names)}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=0.5)
    guess = f"did you mean {plain[close[0]]!r}?" if close else ""
    if not show:
        return guess
    listed = ", ".join(names)
    if len(names) > show:
        most = min(show, _NEAREST)
        near = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=most, cutoff=0)
        where = f": {all_in}" if all_in else ""
        listed = ", ".join([*(plain[one] for one in near), f"... ({len(names)} in all{where})"])
    return f"{guess} allowed: {listed}".strip() if names else "nothing is allowed here"


def unknown_name(
    key: str, name: str, kind: str, valid: Iterable[str], *, all_in: str = ""
) -> ConfigError:
    """The error of a key whose value is none of the valid names; arguments as `suggest_name`.

    >>> print(unknown_name("optimizer.name", "sdg", "optimiser", ["adam", "sgd"]))
    optimizer.name='sdg': unknown optimiser; did you mean 'sgd'? allowed: adam, sgd
    """
    return ConfigError(key, name, f"unknown {kind}", suggest_name(name, valid, all_in=all_in))


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which progress bars replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def filter(self, record: logging.LogRecord) -> bool:
        # A handler of the root logger may print the record already.
        return not any(
            type(handler) is logging.StreamHandler and handler.level <= record.levelno
            for handler in logging.root.handlers
        )

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_messages() -> None:
    """Prints the messages of the ``solo_ext`` loggers on standard error from now on.

    Call it again after other code configured logging: Hydra's ``job_logging: disabled``, as in
    solo-learn's configs, disables every existing logger.

    >>> show_messages()
    >>> logging.getLogger("solo_ext.data").getEffectiveLevel() == logging.INFO
    True
    """
    logger = logging.getLogger("solo_ext")
    for name, known in logging.root.manager.loggerDict.items():
        if isinstance(known, logging.Logger) and name.partition(".")[0] == "solo_ext":
            known.disabled = False
    logger.setLevel(logging.INFO)
    if not any(isinstance(h, _Stderr) for h in (*logger.handlers, *logging.root.handlers)):
        # solo-learn logs by the root logger, which would get a handler of another format.
        (logger if logging.root.handlers else logging.root).addHandler(_Stderr())
