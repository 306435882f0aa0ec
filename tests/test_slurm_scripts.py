"""The batch script, with stand-ins for what a cluster has."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "slurm" / "pretrain.sbatch"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts of bash")


def submit(folder: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs it as SLURM would; ``srun`` writes down what it is asked, and does the staging."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    # The run itself says what it sees of the data.
    staging = (
        'case "$*" in *" bash -c "*) bash -c "${!#}";; *" rm -rf "*) rm -rf "${!#}";; '
        f'*) ls "${{SOLO_EXT_DATA:-.}}" > {folder}/seen; [[ -z ${{FAILS:-}} ]];; esac'
    )
    asked = f'echo "$SRUN_CPUS_PER_TASK ${{SOLO_EXT_DATA:-}} $*" >> {folder}/asked'
    srun.write_text(f"#!/bin/bash\n{asked}\n{staging}\n")
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    environment = {
        "PATH": f"{srun.parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "14",
        **extra,
    }
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("nodes", [1, 16])
def test_starts_one_process_per_gpu(nodes: int, tmp_path: Path) -> None:
    done = submit(tmp_path, "imagenet/pcl", "data.num_workers=12", SLURM_NNODES=str(nodes))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text() == (
        "14  --kill-on-bad-exit=1 solo-ext pretrain --config-name imagenet/pcl devices=8 "
        f"num_nodes={nodes} strategy=ddp precision=bf16-mixed sync_batchnorm=true "
        "data.num_workers=12\n"
    )
    lines = SCRIPT.read_text().splitlines()
    asked = {line.split()[1] for line in lines if line.startswith("#SBATCH ")}
    per_node = {"--nodes=1", "--ntasks-per-node=8", "--gpus-per-node=8"}
    assert {*per_node, "--requeue", "--open-mode=append", "--signal=USR1@300"} <= asked


@pytest.mark.parametrize("fails", ["", "yes"])
def test_stages_the_data_first(tmp_path: Path, fails: str) -> None:
    """And leaves nothing of them, however the run ends."""
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "image").write_text("1")
    archive = tmp_path / "data.tar"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(tmp_path), "imagenet"], check=True)
    local = tmp_path / "local"
    done = submit(
        tmp_path,
        "imagenet/pcl",
        SOLO_EXT_STAGE=str(archive),
        SLURM_TMPDIR=str(local),
        FAILS=fails,
    )
    assert done.returncode == bool(fails), done.stderr
    data = local / "solo-ext-17"
    assert (tmp_path / "seen").read_text() == "imagenet\n"
    assert not list(local.iterdir())
    first, second, last = (tmp_path / "asked").read_text().splitlines()
    assert first.startswith(f"14 {data} --ntasks-per-node=1 --ntasks=1 ")
    assert second.startswith(f"14 {data} --kill-on-bad-exit=1 solo-ext pretrain")
    assert last.endswith(f"--ntasks-per-node=1 --ntasks=1 --kill-on-bad-exit=1 rm -rf {data}")


def test_without_a_config_says_how(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert done.returncode == 2
    assert "CONFIG_NAME [key=value ...]" in done.stderr
    assert not (tmp_path / "asked").exists()
