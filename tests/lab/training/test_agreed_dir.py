"""One run directory for a run of several processes, and of several starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.config.check import check_run
from solo_ext.config.schema import RunConfig
from solo_ext.lab.training.run_dir import agreed_run_dir, choose_run_dir

MakeConfig = Callable[..., dict[str, Any]]

# The second process looks once the first has made its directory; when both have, they fail, once.
LATE = """
import os, sys, time
from pathlib import Path
import yaml
from solo_ext.config.check import check_run
from solo_ext.lab.training.run_dir import agreed_run_dir

rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
given = check_run(yaml.safe_load(Path(sys.argv[1]).read_text()))

def wait_for(number):
    while not Path(f"{sys.argv[1]}-{number}-{again}").exists():
        time.sleep(0.05)

if rank:
    wait_for(0)
path = agreed_run_dir(given)
path.mkdir(parents=True, exist_ok=True)
print("took", rank, again, path, flush=True)
Path(f"{sys.argv[1]}-{rank}-{again}").touch()
wait_for(1 - rank)
sys.exit(0 if again else 1)
"""


@pytest.fixture
def given(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    return check_run(make_config("simclr", checkpoint={"dir": str(tmp_path / "runs")}))


@pytest.mark.slow
def test_processes_of_torchrun(given: RunConfig, tmp_path: Path) -> None:
    """The same one, and again after a restart: the run goes on there."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given.model_dump()))
    words = ["--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", *words),
            *(str(tmp_path / "late.py"), str(tmp_path / "given.yaml")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = sorted(line.split()[1:] for line in done.stdout.splitlines() if "took" in line)
    first = str(choose_run_dir(given)).removesuffix("-2")
    assert lines == [[rank, again, first] for rank in "01" for again in "01"]


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "pcl"}, "-job-17"),
        (
            {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"},
            "-job-17_2",
        ),
    ],
    ids=["job", "array"],
)
def test_a_requeued_job_goes_on(
    job: dict[str, str], ending: str, given: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = choose_run_dir(given)
    for key, value in job.items():
        monkeypatch.setenv(key, value)
    path = agreed_run_dir(given)
    assert path == plain.with_name(plain.name + ending)
    path.mkdir(parents=True)
    assert agreed_run_dir(given) == path


def test_by_hand_within_a_job(given: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is another run."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    first = agreed_run_dir(given)
    first.mkdir(parents=True)
    assert agreed_run_dir(given).name == f"{first.name}-2"
