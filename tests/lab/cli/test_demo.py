"""The demo on the real digits, in processes as users start it; one seed, one epoch."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from solo_ext.lab.experiments.records import read_records
from tests import forks

pytestmark = [pytest.mark.fault, pytest.mark.slow]
_ONE_SEED = """
import sys
from solo_ext.lab.cli import benchmark, main
read = benchmark.read_benchmark
benchmark.read_benchmark = lambda name: read(name, ["seeds=[1]"])
sys.exit(main.main(sys.argv[1:]))
"""


def demo(out: Path) -> forks.Fork:
    env = {**os.environ, "SOLO_EXT_DATA": str(out.parent / "data")}
    return forks.start("-c", _ONE_SEED, "demo", "--epochs=1", "--json", "--out", out, env=env)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_folder_that_cannot_be_made_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = demo(tmp_path / "file")
    _, said = refused.communicate()
    assert refused.returncode == 2, said
    assert not is_alive(refused.pid)


@pytest.mark.matrix
def test_interrupted_and_begun_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = demo(out)
    while not any(out.glob("runs/*/epochs.jsonl")) and first.poll() is None:
        time.sleep(0.05)
    # As a terminal does: all processes of the command get it.
    os.killpg(first.pid, signal.SIGINT)
    said = first.communicate()
    assert (first.returncode, said[0]) == (130, ""), said[1]
    assert said[1].splitlines()[-1] == (
        "solo-ext: stopped by SIGINT; what is finished stays, and the same command goes on"
    )
    assert "Traceback" not in said[1]
    # The process that runs were forked from notices that it is no longer needed.
    deadline = time.monotonic() + 30
    while is_alive(first.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    second = demo(out)
    text, progress = second.communicate()
    assert second.returncode == 0, progress
    shown = json.loads(text)
    assert "results/digits" in shown["about"]
    assert [row["Row"] for row in shown["scores"]] == ["teacher", "SimCLR", "SEED"]
    for row in shown["scores"]:
        assert all(10 < float(row[m]) <= 100 for m in ("linear", "lowshot_10_per_class", "knn"))
    assert [row["Difference"] for row in shown["differences"]] == ["SEED minus SimCLR"]
    # Where there is no terminal, a line for each run.
    assert "3/3  " in progress
    assert {r["row"] for r in read_records(out)} == {"teacher", "simclr", "seed"}
    assert "SEED minus SimCLR" in Path(shown["written"][1]).read_text()
