"""The demo on the real digits, in processes as users start it; one seed, one epoch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solo_ext.lab.experiments.records import read_records

_ONE_SEED = """
import sys
from solo_ext.lab.cli import benchmark, main
read = benchmark.read_benchmark
benchmark.read_benchmark = lambda name: read(name, ["seeds=[1]"])
sys.exit(main.main(sys.argv[1:]))
"""


def demo(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ONE_SEED, "demo", "--epochs=1", "--json", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SOLO_EXT_DATA": str(out.parent / "data")},
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.fault
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
    with pytest.raises(ProcessLookupError):
        os.killpg(first.pid, 0)

    second = demo(out)
    text, progress = second.communicate()
    assert second.returncode == 0, progress
    shown = json.loads(text)
    assert "results/digits" in shown["about"]
    assert list(shown["scores"]) == ["teacher", "SimCLR", "SEED"]
    for scores in shown["scores"].values():
        assert set(scores) == {"linear", "lowshot_10_per_class", "knn"}
        assert all(10 < one["mean"] <= 100 for one in scores.values())
    assert list(shown["differences"]) == ["SEED minus SimCLR"]
    # Where there is no terminal, a line for each run.
    assert "3/3  " in progress
    assert {r["row"]: list(r["losses"]) for r in read_records(out)} == {
        "teacher": ["nce_loss"],
        "simclr": ["nce_loss"],
        "seed": ["seed_loss"],
    }
    page = Path(shown["report"]).read_text()
    for label in shown["scores"]:
        assert f"<figcaption>{label}</figcaption>" in page
