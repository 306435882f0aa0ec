"""What only a process of its own meets: handles, streams, locale, a removed directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks
from tests.attack.world import settings
from tests.conftest import made_images
from tests.lab.cli.conftest import Command
from tests.lab.training.same_run import command_of

pytestmark = [pytest.mark.fault, pytest.mark.slow]
COMMAND = [sys.executable, "-m", "solo_ext.lab.cli.main"]
RESULTS = Path(__file__).parents[3] / "results"
HOST = os.environ.get("SOLO_LEARN_ROOT", "")


def environment(host: str = HOST, **changes: str) -> dict[str, str]:
    """With solo-learn's checkout, or with the release that is installed."""
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != HOST]
    path = os.pathsep.join([*others, *[host] * bool(host)])
    return {**os.environ, "PYTHONPATH": path, **changes}


def said(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The last line of standard error, without a traceback before it."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return (done.stderr.splitlines() or [""])[-1]


@pytest.fixture
def pretrain(tmp_path: Path) -> str:
    """A command of the shell that trains a tiny run in ``run``."""
    config = settings(made_images(tmp_path / "images"), "debiased")
    return " ".join([*COMMAND, *command_of(config, tmp_path, tmp_path / "run")])


def after(code: str, words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the shell in a fork that has done something to itself before."""
    command = "import sys\nfrom solo_ext.lab.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    _, rest = words.split(COMMAND[-1])
    return forks.run("-c", f"{code}\n{command}", *rest.split(), env=environment())


def shell(command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**changes),
    )


FEW_HANDLES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"


def test_too_few_file_handles_for_the_workers(pretrain: str) -> None:
    assert "`ulimit -n`" in said(after(FEW_HANDLES, f"{pretrain} data.num_workers=4"), 2)


# As in a process that starts without the stream, which has no such object.
CLOSED = "import os, sys\nos.close(2)\nsys.stderr = sys.__stderr__ = None"
FULL = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
UNREAD = """
import os, sys
read, write = os.pipe()
os.dup2(write, 2)
os.close(write)
os.close(read)
# That of the fork is of a file, in which one can seek.
sys.stderr = open(2, "w", closefd=False)
"""


@pytest.mark.parametrize("changed", [CLOSED, FULL, UNREAD], ids=["closed", "full", "unread"])
def test_lines_that_nobody_takes(changed: str, pretrain: str, tmp_path: Path) -> None:
    """The run goes on without them."""
    words = f"{pretrain} max_epochs=2 online_eval.every_n_epochs=1"
    assert said(after(changed, words), 0) == ""
    assert list((tmp_path / "run").glob("*-ep=1.ckpt"))


def test_lines_of_a_benchmark_that_nobody_takes() -> None:
    words = " ".join([*COMMAND, "benchmark", "run", "demo", "--dry-run"])
    assert said(after(UNREAD, words), 0) == ""


def started(pretrain: str, run: Path, **changes: str) -> forks.Fork:
    """A run of many epochs, after its first."""
    _, *words = pretrain.split()
    process = forks.start(*words, "max_epochs=1000", env=environment(**changes))
    while not list(run.glob("*-ep=0.ckpt*")):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def ended(process: forks.Fork) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.wait(), out, errors)


def test_a_run_directory_that_is_removed(pretrain: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(pretrain, run)
    # The run writes all the time, and may put a file into a folder that is just being emptied.
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)
    assert "while training" in said(ended(process), 2)


@pytest.mark.upstream
@pytest.mark.skipif(not HOST, reason="SOLO_LEARN_ROOT names no checkout of main")
def test_a_run_goes_on_with_the_other_host(pretrain: str, tmp_path: Path) -> None:
    process = started(pretrain, tmp_path / "run", host="")
    process.send_signal(signal.SIGTERM)
    assert "is saved" in said(ended(process), 128 + signal.SIGTERM)
    process = forks.start(*COMMAND[1:], "pretrain", "--resume", tmp_path / "run", env=environment())
    told = ""
    while "goes on in another environment" not in told:
        assert process.poll() is None, told
        time.sleep(0.05)
        told = Path(process.files[2]).read_text()
    process.kill()
    assert "host.generation: 1.0.2 -> main" in told


@pytest.mark.upstream
@pytest.mark.skipif(not HOST, reason="SOLO_LEARN_ROOT names no checkout of main")
def test_a_run_that_cannot_go_on_with_the_other_host(pretrain: str, tmp_path: Path) -> None:
    """The release's schedule with a warm-up needs what main's does not keep."""
    warm = f"{pretrain} scheduler.name=warmup_cosine"
    process = started(warm, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert "is saved" in said(ended(process), 128 + signal.SIGTERM)
    words = (*COMMAND[1:], "pretrain", "--resume", tmp_path / "run")
    line = said(forks.run(*words, env=environment(host="")), 2)
    assert "has no 'lr_lambdas', which the installed solo-learn needs" in line


def test_evaluations_while_a_run_writes_checkpoints(
    pretrain: str, tmp_path: Path, command: Command
) -> None:
    """After every step: each finds one that is whole."""
    process = started(pretrain, tmp_path / "run")
    out = f"out={tmp_path / 'out'}"
    results = [command("eval", "knn", str(tmp_path / "run"), out) for _ in range(8)]
    assert process.poll() is None
    process.kill()
    ended(process)
    assert [result.code for result in results] == [0] * 8, [result.err for result in results]


def test_weights_that_cannot_be_fetched(pretrain: str, tmp_path: Path) -> None:
    # What HF_HUB_OFFLINE and HF_HOME set when the library is imported.
    offline = "from huggingface_hub import constants\nconstants.HF_HUB_OFFLINE = True\n"
    offline += f"constants.HF_HUB_CACHE = {str(tmp_path / 'hub')!r}"
    line = said(after(offline, f"{pretrain} +backbone.kwargs.pretrained=true"), 2)
    assert "backbone.kwargs.pretrained=true: its weights cannot be fetched" in line
    assert not (tmp_path / "run").exists()


def test_a_folder_in_the_home_folder(pretrain: str, tmp_path: Path) -> None:
    """Shells leave ``~`` alone after ``=``."""
    words = pretrain.replace(f"--run-dir={tmp_path}/run", "--run-dir=~/run max_epochs=1")
    done = forks.run(*words.split()[1:], env=environment(HOME=str(tmp_path)))
    assert said(done, 0).startswith("debiased  epoch 1/1")
    assert list((tmp_path / "run").glob("*-ep=0.ckpt"))


def test_a_report_in_a_locale_without_most_letters(tmp_path: Path) -> None:
    """And without standard error."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    report = " ".join([*COMMAND, "benchmark", "report", str(RESULTS / "label_free_clusters")])
    assert said(shell(f"{report} --out={tmp_path} 2>&-", **plain), 0) == ""
    assert not (tmp_path / "report.html").read_text(encoding="utf-8").isascii()
