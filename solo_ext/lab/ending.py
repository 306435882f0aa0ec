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

from solo_ext.core.errors import (
    LONGEST_VALUE,
    StoppedBySignal,
    UserError,
    disk_trouble,
    first_line,
)


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
    ends: dict[int, Callable[[int, FrameType | None], None]] = {}
    watch = None
    _interrupted.clear()
    _over.clear()
    try:
        for number in before:
            end = _interrupt if number == signal.SIGINT else _end
            ends[number] = functools.partial(end, again, os.getpid())
            signal.signal(number, ends[number])
        if before:
            watch = _Watch(again, ends)
        try:
            code = command()
        except StoppedBySignal:
            raise
        except Exception as error:
            # What a library does on the way out can fail and hide the interrupt, as in omegaconf.
            if _interrupted.is_set():
                raise KeyboardInterrupt from error
            raise
        sys.stdout.flush()
        # A signal that comes after the work is done changes nothing.
        _over.set()
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
        _over.set()
        if watch is not None:
            watch.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    with contextlib.suppress(OSError):
        print(f"solo-ext: {line}", file=sys.stderr)
    return code


def end_with(code: int) -> None:
    """Lets a signal that comes while the process ends do no more than end it with its exit code.

    By default it would end it with another code, as if the command had not done its work.

    >>> before = {number: signal.getsignal(number) for number in _ends_a_command()}
    >>> end_with(0)
    >>> for number, handler in before.items():
    ...     _ = signal.signal(number, handler)
    """
    for number in _ends_a_command():
        signal.signal(number, lambda *_: os._exit(code))


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


class _Watch:
    """Ends the process for a signal that its main thread does not answer.

    Python runs handlers between two of its instructions, so that a main thread which waits in a
    library's C code, as for the processes of other nodes, would answer no signal. Python's part in
    C writes the signal's number to a pipe at once, which a thread reads here. Where a run has
    replaced the handlers by its own, it decides itself when to end, and the thread ends it only if
    a signal stayed unanswered, a line said so, and the same signal came again.
    """

    current: _Watch | None = None

    def __init__(self, again: str, ends: dict[int, Callable[..., None]]) -> None:
        _Watch.current = self
        self._again, self._ends = again, ends
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        _Watch.current = None
        signal.set_wakeup_fd(self._before)
        # Closing the pipe would not do: workers that this process has forked hold it open too.
        self.note(0)
        self._thread.join()
        os.close(self._write)
        os.close(self._read)

    def note(self, number: int) -> None:
        """Tells the thread that a handler ran; 0 ends the thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number and number | _ANSWERED]))

    def _wait(self) -> None:
        unanswered = told = 0
        while True:
            seconds = _SECONDS_UNTIL_TOLD if unanswered else None
            if not select.select([self._read], [], [], seconds)[0]:
                unanswered, told = 0, unanswered
                self._tell(told)
            elif not (number := next(iter(os.read(self._read, 1)), 0)):
                return
            elif number & _ANSWERED:
                unanswered = told = 0
            elif self._is_ours(number):
                # `_end` answers by ending the process.
                if not _interrupted.wait(_SECONDS_TO_ANSWER):
                    _end(self._again, os.getpid(), number, _frame_of_main())
            elif number == told:
                _end(_GO_ON, os.getpid(), number, _frame_of_main())
            else:
                unanswered = number

    def _is_ours(self, number: int) -> bool:
        handler = signal.getsignal(number)
        # Before the first step Lightning puts several handlers into one.
        several = getattr(handler, "signal_handlers", [handler])
        return number in self._ends and self._ends[number] in several

    def _tell(self, number: int) -> None:
        waited = _waited_for(_frame_of_main()) or "an operation to end"
        line = f"it stops after that. Send {signal.Signals(number).name} again to end it at once;"
        os.write(2, f"solo-ext: the run waits for {waited}; {line} {_GO_ON}\n".encode())


def note_answer(number: int) -> None:
    """To be called by a handler that a run has put in the place of ours.

    Args:
        number: the signal that it handles.

    >>> note_answer(signal.SIGTERM)
    """
    if _Watch.current is not None:
        _Watch.current.note(number)


def _frame_of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


_interrupted = threading.Event()
"""Set once Ctrl-C has been answered, which may take a while to clean up."""
_over = threading.Event()
"""Set once it is known how the command ends."""
_SECONDS_TO_ANSWER = 0.5
_SECONDS_UNTIL_TOLD = 1.0
_ANSWERED = 128
"""Added to a signal's number in the pipe once its handler has run."""
_GO_ON = "--resume continues from the last checkpoint"


_set_aside: list[int] = []


def _before_fork() -> None:
    # The new process would tell this one of the signals that it receives itself. Only the main
    # thread may ask for that; what other threads fork is replaced by another program at once.
    if _Watch.current and threading.current_thread() is threading.main_thread():
        _set_aside.append(signal.set_wakeup_fd(-1))


def _after_fork() -> None:
    if _set_aside:
        signal.set_wakeup_fd(_set_aside.pop(), warn_on_full_buffer=False)


def _in_child() -> None:
    _set_aside.clear()
    _Watch.current = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _interrupt(again: str, pid: int, number: int, frame: FrameType | None) -> None:
    if _over.is_set():
        return
    _interrupted.set()
    inner = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            _end(again, pid, number, inner)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end(again: str, pid: int, number: int, frame: FrameType | None) -> None:
    # Exit at once: a library that is being imported can swallow an exception and fail later with an
    # error of its own, as numpy does, or abort in its C++ code.
    if _over.is_set() and os.getpid() == pid:
        return
    if os.getpid() == pid:
        name = signal.Signals(number).name
        what = "interrupted" if number == signal.SIGINT else f"stopped by {name}"
        waited = _waited_for(frame)
        while_ = f" while it waited for {waited}" if waited else ""
        os.write(2, f"solo-ext: {what}{while_}; {again}\n".encode())
        _end_children(number)
    os._exit(128 + number)


def _waited_for(frame: FrameType | None) -> str | None:
    """What the innermost known call of a stack waits for."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return None
        name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
        for module, function, what in _WAITS:
            if name.startswith(module) and name.endswith(function):
                address = [os.environ.get(n, "?") for n in ("MASTER_ADDR", "MASTER_PORT")]
                return what.format(":".join(address))
        frame = frame.f_back
    return None


_WAITS = (
    ("torch.distributed.rendezvous", "", "the other processes to join at {}"),
    ("torch.distributed.", ".init_process_group", "the other processes to join at {}"),
    ("torch.distributed.", "", "the other processes"),
    ("filelock.", "", "a lock that another process holds"),
    ("socket", "", "an answer from the network"),
    ("ssl", "", "an answer from the network"),
)
"""Module and function of a call, and what it waits for; the first that fits."""


def _end_children(number: int) -> None:
    """Passes the signal on to the processes of this machine's other ranks, which wait likewise."""
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                for child in file.read().split():
                    with contextlib.suppress(OSError):
                        os.kill(int(child), number)
                        # A suspended one receives it when it goes on.
                        os.kill(int(child), signal.SIGCONT)


def _unforeseen(error: Exception, again: str) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory; take smaller batches, fewer workers or more memory, then {again}"
    # Code that raised or passed on the error may have noted a better way to continue.
    again = getattr(error, "__notes__", [again])[-1]
    return f"{log_traceback(error)}; {again}"
