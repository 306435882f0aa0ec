"""The edge of a command: whatever ends it early is one line, with a documented exit code."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from solo_ext.core.errors import UserError
from solo_ext.lab import ending
from solo_ext.lab.ending import in_one_line
from tests import forks

pytestmark = pytest.mark.fault
COMMAND = [sys.executable, "-m", "solo_ext.lab.cli.main"]


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def raising(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("lr=0: too small"), 2, "lr=0: too small"),
        (KeyboardInterrupt(), 130, "interrupted; start it again"),
        (PermissionError(13, "Permission denied", "/x"), 2, "Permission denied: '/x'; give perm"),
        (IsADirectoryError(21, "Is a directory", "/x"), 2, "in the way"),
        (OSError(24, "Too many open files"), 2, "ulimit -n"),
        (MemoryError(), 1, "out of memory; take smaller batches"),
    ],
)
def test_one_line(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_one_line(lambda: raising(error), "start it again") == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("solo-ext: ")
    assert says in line


def test_an_error_that_nobody_foresaw(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names a file with the traceback."""
    assert in_one_line(lambda: raising(ZeroDivisionError("by\nzero")), "start it again") == 1
    (line,) = capsys.readouterr().err.splitlines()
    found = re.fullmatch(
        r"solo-ext: ZeroDivisionError: by \(details in (\S+\.log)\); start it again", line
    )
    assert found is not None, line
    log = Path(found[1])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_handlers_are_those_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert in_one_line(lambda: 0, "") == 0
    assert signal.getsignal(signal.SIGTERM) is before


ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")]


def heeded() -> None:
    """Whoever runs the tests may ignore these signals, as ``nohup`` does."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def handles(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler of a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_a_signal_before_training(tmp_path: Path) -> None:
    """Libraries are still being imported."""
    words = ["pretrain", "--config-name", "digits/simclr", "--run-dir", str(tmp_path / "run")]
    started = [
        subprocess.Popen(
            [*COMMAND, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=heeded
        )
        for _ in ENDING
    ]
    for process in started:
        # Python itself has one of SIGINT.
        while not handles(process, signal.SIGHUP):
            assert process.poll() is None
            time.sleep(0.01)
    time.sleep(0.5)
    for number, process in zip(ENDING, started, strict=True):
        process.send_signal(number)
    for number, process in zip(ENDING, started, strict=True):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + number, said
        what = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
        assert said == f"solo-ext: {what}; start it again\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("during", ["exec('raise KeyboardInterrupt')", "__import__('library')"])
def test_interrupted_while_libraries_are_imported(during: str, tmp_path: Path) -> None:
    """Within a string that they run, or where one swallows it and fails by its own error."""
    (tmp_path / "library.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n"
        "    raise RecursionError from None\n"
    )
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from solo_ext.lab.ending import in_one_line\n"
        f"sys.exit(in_one_line(lambda: {during}, 'again'))\n"
    )
    words = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "solo-ext: interrupted; again\n")


def test_interrupted_where_the_way_out_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """As omegaconf's does, which then raises an error of its own."""

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RecursionError

    assert in_one_line(command, "start it again") == 130
    assert capsys.readouterr().err == "solo-ext: interrupted; start it again\n"


@pytest.mark.parametrize("words", [["losses"], ["losses", "--json"]], ids=str)
def test_output_that_nobody_reads(words: list[str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    command = " ".join([*COMMAND, "pretrain", "--config-name", "digits/simclrr", closed])
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.slow
def test_a_locale_without_most_letters() -> None:
    """What cannot be printed is escaped."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*COMMAND, "pretrain", "--config-name", "digits/\N{GREEK SMALL LETTER BETA}"],
        env={**os.environ, **plain},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"no such config" in done.stderr
    assert b"Traceback" not in done.stderr


ENDS = """
import signal, sys
# What starts the tests may ignore it, as nohup does.
signal.signal(signal.%s, signal.SIG_DFL)
from solo_ext.lab.cli.main import main
sys.argv = ["solo-ext", "losses"]
main()
signal.raise_signal(signal.%s)
sys.exit(7)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_once_all_is_done(name: str) -> None:
    """The process takes a second to end after the command's last line."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS % (name, name)], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


WAITS = """
import os, signal, subprocess, sys, time
from solo_ext.lab.ending import in_one_line

# What starts the tests may ignore them, as nohup does.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

def command():
    from datetime import timedelta
    import torch.distributed as dist
    child = subprocess.Popen(["sleep", "60"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    print(child.pid, flush=True)
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=timedelta(seconds=60))

sys.exit(in_one_line(command, "start it again"))
"""


def line_of(process: forks.Fork, stream: int, text: str) -> str:
    """The first whole line of its output that a text is in, once it is written."""
    while True:
        said = Path(process.files[stream]).read_text()
        for line in said.splitlines(keepends=True):
            if text in line and line.endswith("\n"):
                return line
        assert process.poll() is None, said
        time.sleep(0.02)


def said_at_its_end(process: forks.Fork) -> str:
    """Its standard error; none is left that does not end."""
    try:
        return process.communicate(timeout=30)[1]
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_a_library_waits_in_c(name: str, free_port: int) -> None:
    """Where Python's handlers do not run; nor does what it started go on."""
    number = getattr(signal, name)
    process = forks.start("-c", WAITS, free_port)
    child = int(line_of(process, 1, ""))
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(number)
    errors = said_at_its_end(process)
    assert process.returncode == 128 + number
    what = "interrupted" if name == "SIGINT" else f"stopped by {name}"
    assert errors.splitlines()[-1] == (
        f"solo-ext: {what} while it waited for the other processes to join at "
        f"127.0.0.1:{free_port}; start it again"
    )
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_a_signal_while_other_nodes_do_not_come(free_port: int, tmp_path: Path) -> None:
    """As the second node; the first waits as the program above does."""
    words = ["pretrain", "--config-name", "digits/simclr", "--run-dir", str(tmp_path / "run")]
    words += ["num_nodes=3", "devices=1", "strategy=ddp", "accelerator=cpu"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    env = os.environ | address | {"NODE_RANK": "1"}
    process = forks.start(*forks.SOLO_EXT, *words, cwd=tmp_path, env=env)
    line_of(process, 2, "Initializing distributed")
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    errors = said_at_its_end(process)
    assert process.returncode == 143
    assert "solo-ext: stopped by SIGTERM while it waited for the other processes" in errors


def test_a_signal_of_a_forked_process_is_not_its_parent_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The parent would end at once for a signal of its own that it does not answer.
    monkeypatch.setattr(ending, "_SECONDS_TO_ANSWER", 0.0)

    def command() -> int:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] != 0
        time.sleep(0.3)
        return 7

    assert in_one_line(command, "start it again") == 7


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_after_the_work_is_done(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    close = ending._Watch.close

    def closed_late(watch: ending._Watch) -> None:
        signal.raise_signal(getattr(signal, name))
        close(watch)

    monkeypatch.setattr(ending._Watch, "close", closed_late)
    assert in_one_line(lambda: 7, "start it again") == 7
    assert capsys.readouterr().err == ""


def test_a_process_that_outlives_its_command() -> None:
    """Loader workers that are left inherit everything that the command has open."""
    children = []

    def command() -> int:
        if not (child := os.fork()):
            signal.pause()
        children.append(child)
        return 7

    try:
        assert in_one_line(command, "start it again") == 7
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
