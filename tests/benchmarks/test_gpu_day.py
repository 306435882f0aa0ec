"""The day with a GPU: whole at toy size, and with a stand-in for Python."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day import write_page
from solo_ext.lab.experiments.results import read_results

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_day.sh"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script of bash; DALI")


def day(*words: str, path: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs the script; ``path`` holds its Python."""
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **extra}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a Python that writes down what it is asked; ``FAILS`` in it: exit code 3."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/bash\n[ "$1" != -c ] || {{ echo a b; exit "${{NO_GPU:-0}}"; }}\n'
        f'echo "$*" >> {tmp_path}/asked\necho said\n'
        '[[ -z ${FAILS:-} || "$*" != *"$FAILS"* ]] || exit 3\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python.parent


def test_a_part_that_fails_keeps_none_back_and_alone_is_done_again(
    stand_in: Path, tmp_path: Path
) -> None:
    out, asked = tmp_path / "out", tmp_path / "asked"
    done = day(str(out), path=stand_in, FAILS="e_step_ranks")
    assert done.returncode == 1, done.stderr
    parts = ["tests", "images", "e-step", "speed-a", "speed-b", "training-200"]
    lines = (out / "parts.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == parts
    assert lines[2].startswith("e-step: FAILED, exit code 3;")
    assert lines[2].endswith("ends with: said")
    commands = asked.read_text().splitlines()
    assert len(commands) == len(parts) + 1
    assert "--rows 1281167 --clusters 25000 50000 100000 --device cuda" in commands[2]
    assert "gpu_day budgets.default=['max_epochs=200'] --out" in commands[5]
    again = day(str(out), path=stand_in, EPOCHS="100")
    assert again.returncode == 0, again.stderr
    step, training, page = asked.read_text().splitlines()[len(commands) :]
    assert step == commands[2]
    assert "max_epochs=100" in training
    assert page == f"-m benchmarks.gpu_day {out}"


def test_needs_a_gpu(stand_in: Path, tmp_path: Path) -> None:
    assert day(str(tmp_path / "out"), path=stand_in, NO_GPU="1").returncode == 2
    assert not (tmp_path / "asked").exists()
    unknown = day("--tiny", path=stand_in)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "gpu_day.sh [--toy] [OUT]: no option --tiny\n",
    )


def test_the_page_of_parts_that_failed(tmp_path: Path) -> None:
    (tmp_path / "parts.txt").write_text("tests: FAILED, exit code 1\n")
    failed = '<testcase classname="tests.a" name="test_b"><failure/></testcase>'
    (tmp_path / "tests.xml").write_text(f"<testsuite><testcase/>{failed}</testsuite>")
    page = write_page(tmp_path).read_text()
    assert "1 passed, 1 failed, 0 skipped." in page
    assert "failed: tests.a::test_b" in page
    assert page.count("No record.") == 4


@pytest.mark.slow
def test_toy(tmp_path: Path) -> None:
    words = "--toy", str(tmp_path)
    here = Path(sys.executable).parent
    done = day(*words, path=here)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "toy"
    records = [*out.glob("*.jsonl"), out / "tests.xml", out / "training" / "records.jsonl"]
    assert len(records) == 5
    before = [file.stat().st_mtime_ns for file in records]
    page = (out / "page.html").read_text()
    assert "No record." not in page
    for shown in (
        "training-1: done in",
        "0 failed",
        "dali cpu, 1 thread",
        "2,000 x 128 into 25 + 50 + 100 clusters",
        "concentrations, 50,000 rows",
        "1 epochs of 1,400 images",
    ):
        assert shown in page, shown
    assert {r["row"] for r in read_results(out / "training").records} == {"pcl"}
    again = day(*words, path=here)
    assert again.returncode == 0
    assert "==" not in again.stdout
    assert again.stdout.count("done before") == 2 * 5
    assert [file.stat().st_mtime_ns for file in records] == before
