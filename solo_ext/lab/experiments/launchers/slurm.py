"""Runs as an array of SLURM jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.launchers.base import TICK, Launcher, Outcome, is_ready, untaught
from solo_ext.lab.experiments.work import RECORD, work

_JOB = "slurm_job"


class Job:
    """What a job of the array does; one that is pre-empted is queued again and goes on."""

    def __call__(self, folder: str) -> None:
        work(Path(folder))

    def checkpoint(self, folder: str) -> Any:
        """Called by submitit before the job is taken away."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Job(), folder)


class SlurmLauncher(Launcher):
    """An array of jobs through submitit.

    Args:
        parallel: jobs at once; null leaves that to SLURM.
        threads: CPU threads of a run.
        logs: folder of submitit's files.
        options: of submitit's executor, such as ``slurm_partition`` and ``timeout_min``.
        cluster: ``slurm``; ``local`` runs the same jobs as processes of this machine.
    """

    def __init__(
        self,
        parallel: int | None,
        threads: int,
        logs: Path,
        options: dict[str, Any] | None = None,
        cluster: str = "slurm",
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError(
                "--launcher slurm needs submitit, which is not installed: pip install "
                "'solo-ext[benchmark]'"
            ) from None
        try:
            self.executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        except RuntimeError as error:
            raise UserError(f"--launcher slurm: {error}; use --launcher local") from None
        given = {"cpus_per_task": threads, "name": "solo-ext", **(options or {})}
        if parallel is not None and cluster == "slurm":
            given["slurm_array_parallelism"] = parallel
        try:
            self.executor.update_parameters(**given)
        except (TypeError, NameError, ValueError) as error:
            raise ConfigError("--slurm", options, str(error).splitlines()[0]) from None

    def run(
        self, folders: Sequence[Path], needs: Mapping[Path, Path], tick: Callable[[], None]
    ) -> list[Outcome]:
        first = [f for f in folders if is_ready(f, needs)]
        students = [f for f in folders if f not in first]
        failed = self._array(first, tick)
        taught = [f for f in students if is_ready(f, needs)]
        failed += self._array(taught, tick)
        return failed + [untaught(f, needs) for f in students if f not in taught]

    def _queued(self, folder: Path) -> Any | None:
        """The job that an earlier call began for a run, where it has not ended."""
        file = folder / _JOB
        if not file.is_file():
            return None
        job = self.executor.job_class(self.executor.folder, file.read_text())
        return None if job.done(force_check=True) else job

    def _array(self, folders: Sequence[Path], tick: Callable[[], None]) -> list[Outcome]:
        """Jobs go on if this call is interrupted; the next one waits for those that are left."""
        if not folders:
            return []
        jobs = {f: job for f in folders if (job := self._queued(f)) is not None}
        new = [f for f in folders if f not in jobs]
        if new:
            jobs |= zip(new, self.executor.map_array(Job(), [str(f) for f in new]), strict=True)
            for folder in new:
                write_text(folder / _JOB, jobs[folder].job_id)
        while not all(job.done() for job in jobs.values()):
            tick()
            time.sleep(TICK)
        tick()
        failed = []
        for folder, job in jobs.items():
            error = job.exception()
            if error is not None or not (folder / RECORD).is_file():
                lines = [line for line in str(error).splitlines() if line.strip()]
                failed.append(Outcome(folder, lines[-1].strip() if lines else "no record"))
        return failed
