"""Handing a job that has to make room back to its queue."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess

logger = logging.getLogger(__name__)


def requeue(received: signal.Signals) -> bool:
    """Asks SLURM to run this job again.

    Only on SIGUSR1, which SLURM sends where ``sbatch --signal`` asks for it, before the time is
    over. SIGTERM is also what ``scancel`` sends, and a job that SLURM pre-empts it requeues itself.

    Args:
        received: what the processes were sent.

    Returns:
        Whether the job is in the queue again.
    """
    job = _job()
    if job is None or received is not getattr(signal, "SIGUSR1", None):
        return False
    command = shutil.which("scontrol")
    if command is None:
        logger.warning(f"job {job} is not requeued: there is no scontrol here")
        return False
    done = subprocess.run([command, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        logger.warning(f"job {job} is not requeued: {reason}")
    return done.returncode == 0


def _job() -> str | None:
    """The job's name for ``scontrol``, ``None`` outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
