"""Python programs as forks of a process that has imported what they import.

They are at work after a tenth of a second instead of eight. What they share with that process was
imported before they began: a test of a start itself uses ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import multiprocessing.util
import os
import runpy
import secrets
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

SOLO_EXT = ("-m", "solo_ext.lab.cli.main")
"""Words that begin a command line of ``solo-ext``."""
_BEFORE = dict(os.environ)
_READ_ON_IMPORT = ("PYTHONPATH", "OMP_NUM_THREADS")
_NUMBER = struct.Struct("i")
_spawn: Any = multiprocessing.util.spawnv_passfds


class Fork:
    """A program that runs, with the interface of ``subprocess.Popen``; see :func:`start`.

    Args:
        place: folder of the server.
        words: those that follow ``python``.
        cwd: where it starts.
        env: its whole environment.
        files: standard input, output and error.
        path: what modules are searched for in before all but its own folder.
    """

    def __init__(
        self,
        place: str,
        words: Sequence[object],
        cwd: Path | str | None,
        env: Mapping[str, str],
        files: Sequence[str],
        path: Sequence[object] = (),
    ) -> None:
        self.args, self.files = [str(word) for word in words], files
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(f"{place}/socket")
        request = {
            "words": self.args,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env),
            "files": files,
            "path": [str(folder) for folder in path],
        }
        self._line.sendall(f"{json.dumps(request)}\n".encode())
        self.pid = self._number()

    def _number(self) -> int:
        (number,) = _NUMBER.unpack(self._line.recv(_NUMBER.size))
        return int(number)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; none while it runs."""
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def runs_for(self, seconds: float | None) -> bool:
        """Whether it still runs after some seconds; returns at once when it ends."""
        if self.returncode is None:
            select.select([self._line], [], [], seconds)
        return self.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            TimeoutExpired: it still runs after some seconds.
        """
        if self.runs_for(timeout):
            shown = (Path(file).read_text(errors="replace") for file in self.files[1:])
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *shown)
        return self.returncode or 0

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and standard error, once all that hold them have ended."""
        self.wait(timeout)
        found = []
        for name in self.files[1:]:
            with open(name, errors="replace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                found.append(file.read())
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        """Sends it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    path: Sequence[object] = (),
) -> Fork:
    """Starts ``python WORDS`` as the leader of a session of its own.

    Args:
        words: ``-m``, a module and what follows; ``-c``, code and what follows; or a script.
        cwd: where it starts; by default the folder of this process.
        env: its whole environment; by default that of this process.
        path: as the first folders of ``PYTHONPATH``, without a server of their own.
    """
    env = os.environ if env is None else env
    place = _server_for(env)
    output = [tempfile.mkstemp(dir=place) for _ in range(2)]
    for handle, _ in output:
        os.close(handle)
    return Fork(place, words, cwd, env, [os.devnull, *(name for _, name in output)], path)


def run(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    path: Sequence[object] = (),
    timeout: float = 400,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python WORDS`` to its end; see :func:`start`."""
    fork = start(*words, cwd=cwd, env=env, path=path)
    try:
        out, err = fork.communicate(timeout)
    finally:
        fork.kill()
    return subprocess.CompletedProcess(fork.args, fork.wait(), out, err)


def executable(folder: Path) -> Path:
    """A ``python`` for programs that start one, in a folder; it is a fork, too.

    What it reads on import is as in this process.
    """
    file = folder / "python"
    words = shlex.join([sys.executable, "-S", __file__, _server_for(os.environ)])
    file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    file.chmod(0o755)
    return file


def _server_for(env: Mapping[str, str]) -> str:
    return _server(tuple(env.get(name, "") for name in _READ_ON_IMPORT))


@functools.cache
def _server(read: tuple[str, ...]) -> str:
    """The folder of a server, one for each environment that is read by imports.

    The processes of a test run have it in common; whoever comes first starts it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(16)
    digest = hashlib.md5(repr(read).encode()).hexdigest()
    place = f"{tempfile.gettempdir()}/forks-{run[:16]}-{digest[:8]}"
    with _alone(place):
        try:
            held = os.open(f"{place}/held", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            # There is none yet, or the last one has ended.
            shutil.rmtree(place, ignore_errors=True)
            held = _start_server(place, read)
    # It ends when nobody holds this any more; processes do until they end.
    _held.append(held)
    return place


_held: list[int] = []


@contextlib.contextmanager
def _alone(place: str) -> Iterator[None]:
    with open(f"{place}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start_server(place: str, read: tuple[str, ...]) -> int:
    """Returns the end of its standard input that is written to, which nobody does."""
    os.mkdir(place, mode=0o700)
    os.mkfifo(f"{place}/held")
    # In this order, and the first at once, neither waits for the other one.
    stdin = os.open(f"{place}/held", os.O_RDONLY | os.O_NONBLOCK)
    held = os.open(f"{place}/held", os.O_WRONLY)
    process = subprocess.Popen(
        [sys.executable, __file__, place],
        stdin=stdin,
        stdout=subprocess.PIPE,
        env={**_BEFORE, **dict(zip(_READ_ON_IMPORT, read, strict=True))},
        start_new_session=True,
    )
    os.close(stdin)
    assert process.stdout is not None
    assert process.stdout.readline(), "the server has ended"
    # Its parent does not wait for it.
    process.returncode = 0
    return held


def _serve(place: str) -> NoReturn:
    """Imports, and forks for every request, until nobody holds standard input."""
    _import()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}/socket")
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Collections in the forks leave alone, and so do not copy, what they share.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    while True:
        if listener in select.select([listener, sys.stdin], [], [])[0]:
            _serve_one(place, listener)
            continue
        with _alone(place):
            # Another process may have come in the meantime.
            if select.select([sys.stdin], [], [], 0)[0]:
                shutil.rmtree(place, ignore_errors=True)
                os.unlink(f"{place}.lock")
                # Nothing is left to do, and to free what it has imported takes a second.
                os._exit(0)


def _serve_one(place: str, listener: socket.socket) -> None:
    line, _ = listener.accept()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        program = os.fork()
        if program == 0:
            request = json.loads(line.makefile().readline())
            _become(place, line, **request)
        _, status = os.waitpid(program, 0)
        # Nobody may be left to be told.
        with contextlib.suppress(OSError):
            line.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    line.close()


def _import() -> None:
    from PIL import Image

    from solo_ext import host

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if host.detect().generation == "main":
            # What the scripts import, without the patches.
            import solo.data.pretrain_dataloader
            import solo.methods  # noqa: F401
        else:
            host.load()
        Image.init()
        import torch.distributed.run

        import solo_ext.lab.experiments.work
        import solo_ext.lab.training.pretrain  # noqa: F401
    # Functions are called at exit in the reverse order. That of DALI, which most programs do not
    # import, would collect loaders before that of torch says that they need not clean up.
    at_exit = torch.utils.data._utils._set_python_exit_flag
    atexit.unregister(at_exit)
    atexit.register(at_exit)


def _become(
    place: str,
    line: socket.socket,
    words: list[str],
    cwd: str,
    env: dict[str, str],
    files: list[str],
    path: list[str],
) -> NoReturn:
    """Does what ``python WORDS`` does.

    Lightning's ranks and those of torchrun, and fork servers, are forks, too.
    """
    from lightning.fabric.strategies.launchers import subprocess_script as fabric
    from lightning.pytorch.strategies.launchers import subprocess_script
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def rank(args: Sequence[str], env: dict[str, str], cwd: str | None = None, **_: Any) -> Fork:
        return Fork(place, args[1:], cwd, env, _inherited(), path)

    for launcher in (fabric, subprocess_script):
        launcher.subprocess = SimpleNamespace(Popen=rank)  # type: ignore[attr-defined]
    subprocess_handler.Popen = rank  # type: ignore[assignment,attr-defined]
    multiprocessing.util.spawnv_passfds = _start_helper
    os.setsid()
    sys.path[1:1] = path
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, file in enumerate(files):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        # Until this and all its copies are closed.
        fcntl.flock(opened, fcntl.LOCK_SH)
        os.dup2(opened, number)
        os.close(opened)
    if not _seekable(2):
        # That of the server may be of a file, in which one can seek.
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    # From now on signals are the program's.
    line.sendall(_NUMBER.pack(os.getpid()))
    line.close()
    code: Any = 0
    try:
        _execute(words, cwd)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    # As an interpreter ends, but for its memory: to free what is shared would copy it, in seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # Nobody may take it.
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _seekable(handle: int) -> bool:
    try:
        os.lseek(handle, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def _inherited() -> list[str]:
    return [f"/proc/{os.getpid()}/fd/{number}" for number in range(3)]


def _start_helper(path: str, words: list[str], kept: Sequence[int]) -> int:
    if "forkserver" not in words[-1]:
        return int(_spawn(path, words, kept))
    child = os.fork()
    if child == 0:
        for opened in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):
                os.close(opened)
        try:
            exec(words[-1], {})
        finally:
            os._exit(0)
    return child


def _execute(words: list[str], cwd: str) -> None:
    while words[0] in ("-W", "-u"):
        # What torchrun starts with -u flushes what it prints.
        if words[0] == "-W":
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[1 + (words[0] == "-W") :]
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, cwd
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = words, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _stand_in(place: str, *words: str) -> int:
    """A fork with what was given to this process; returns its exit code as a shell has it."""
    passed_on = (signal.SIGTERM, signal.SIGINT)
    # One that comes before there is a fork waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    fork = Fork(place, words, os.getcwd(), os.environ, _inherited())
    for number in passed_on:
        signal.signal(number, lambda number, _: fork.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = fork.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(_stand_in(*sys.argv[1:]))
    _serve(sys.argv[1])
