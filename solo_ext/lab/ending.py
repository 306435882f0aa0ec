"""How a command ends: an exit code, and one line on standard error if something ended it early."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from solo_ext.core.errors import LONGEST_VALUE, UserError, disk_trouble, first_line


def in_one_line(command: Callable[[], int], again: str) -> int:
    """Runs a command; whatever ends it early is printed as one line on standard error.

    The traceback of an unexpected error goes to a file, which the line names.

    Args:
        command: returns an exit code.
        again: how to continue after an interruption or a full disk.

    Returns:
        The command's exit code; after an error 2 if the user or a disk caused it, 128 plus the
        number of a signal, else 1.

    >>> def command() -> int:
    ...     raise UserError("no such config")
    >>> in_one_line(command, "run the command again")  # prints `solo-ext: no such config`
    2
    """
    _streams_that_print()
    # A run replaces these handlers by its own while it trains.
    before = {n: signal.getsignal(n) for n in _ends_a_command()}
    try:
        for number in before:
            end = _interrupt if number == signal.SIGINT else _end
            signal.signal(number, functools.partial(end, again, os.getpid()))
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        line, code = f"interrupted; {again}", 128 + signal.SIGINT
        # If the interrupt came within a string that a library gave to `exec`, Python would end this
        # process by the signal after all. Another `exec` resets that.
        exec("")
    except UserError as error:
        line, code = str(error), error.exit_code
    except SystemExit as left:
        # rich exits in this way if nobody reads the output.
        if isinstance(left.__context__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        trouble = disk_trouble(error, again)
        line, code = (_unforeseen(error, again), 1) if trouble is None else (str(trouble), 2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with contextlib.suppress(OSError):
        print(f"solo-ext: {line}", file=sys.stderr)
    return code


def log_traceback(error: BaseException) -> str:
    """Writes an error's traceback to a file; returns one line with the error and the file's name.

    >>> import pathlib
    >>> line = log_traceback(ValueError("no such table"))
    >>> print(line)
    ValueError: no such table (details in ...solo-ext-...log)
    >>> pathlib.Path(line.removesuffix(")").split()[-1]).unlink()
    """
    text = "".join(traceback.format_exception(error))
    kind, first = type(error).__name__, first_line(error)[:LONGEST_VALUE]
    what = kind if first == kind else f"{kind}: {first}"
    try:
        handle, file = tempfile.mkstemp(prefix="solo-ext-", suffix=".log")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)
    except OSError:
        print(text, file=sys.stderr)
        return what
    return f"{what} (details in {file})"


def _output_is_closed() -> bool:
    # `head`, for example, closes its input early.
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _streams_that_print() -> None:
    """Makes standard output and error accept any text, even if they are closed or ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _ends_a_command() -> list[int]:
    """Ending signals with Python's default handler; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    names = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    of_python = (signal.SIG_DFL, signal.default_int_handler)
    return [n for n in numbers if signal.getsignal(n) in of_python]


def _interrupt(again: str, pid: int, number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            _end(again, pid, number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end(again: str, pid: int, number: int, frame: FrameType | None) -> None:
    # Exit at once: a library that is being imported can swallow an exception and fail later with an
    # error of its own, as numpy does, or abort in its C++ code.
    if os.getpid() == pid:
        name = signal.Signals(number).name
        what = "interrupted" if number == signal.SIGINT else f"stopped by {name}"
        os.write(2, f"solo-ext: {what}; {again}\n".encode())
    os._exit(128 + number)


def _unforeseen(error: Exception, again: str) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory; take smaller batches, fewer workers or more memory, then {again}"
    # Code that raised or passed on the error may have noted a better way to continue.
    again = getattr(error, "__notes__", [again])[-1]
    return f"{log_traceback(error)}; {again}"
