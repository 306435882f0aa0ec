"""Starts the runs of a benchmark: on this machine, or as an array of SLURM jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import refuse_link, write_text
from solo_ext.lab.experiments.work import LOG, PARENT, PEAK, RECORD, work

GIGABYTE = 1e9
TICK = 0.5
"""Seconds between two checks of the runs."""
_PATIENCE = 30.0
_WORK = (sys.executable, "-m", "solo_ext.lab.experiments.work")
_JOB = "slurm_job"


@dataclass(frozen=True)
class Outcome:
    """The end of a run that has no record.

    Attributes:
        folder: its run directory.
        reason: one line.
    """

    folder: Path
    reason: str


class Launcher(ABC):
    """Starts runs and waits for them."""

    @abstractmethod
    def run(
        self, folders: Sequence[Path], needs: Mapping[Path, Path], tick: Callable[[], None]
    ) -> list[Outcome]:
        """Runs every folder that holds ``planned.json``.

        Args:
            folders: run directories, in the order in which to run them.
            needs: for students, the directory of the teacher's run, whose record they wait for.
            tick: called every :data:`TICK` seconds and after the last run.

        Returns:
            The runs that failed; the others go on.
        """


def _is_ready(folder: Path, needs: Mapping[Path, Path]) -> bool:
    """Whether the run that this one depends on has a record."""
    return folder not in needs or (needs[folder] / RECORD).is_file()


def _untaught(folder: Path, needs: Mapping[Path, Path]) -> Outcome:
    """Outcome of a student whose teacher has no record."""
    return Outcome(folder, f"its teacher {needs[folder].name} failed")


@dataclass(frozen=True)
class _Running:
    folder: Path
    process: subprocess.Popen[bytes]
    slot: int


class LocalLauncher(Launcher):
    """Runs as many processes at once as there are places and memory.

    While others are running, a run is started only if enough memory is free: as much as the largest
    finished run needed, or ``memory`` before any has finished.

    Args:
        parallel: places; null: one for each GPU, else one for each ``threads`` cores.
        threads: CPU threads of a run.
        memory: bytes that a run is expected to need.
        devices: GPUs of one run.
        reuse: whether a process does one run after another, so that imports, seconds of a core, are
            paid once. The peak memory of a run is then that of all runs of its process so far.

    Raises:
        ConfigError: more devices than there are GPUs.
    """

    def __init__(
        self,
        parallel: int | None,
        threads: int,
        memory: float,
        devices: int = 1,
        *,
        reuse: bool = False,
    ) -> None:
        present = torch.cuda.device_count()
        if 0 < present < devices:
            raise ConfigError("--devices", devices, f"there are {present} GPUs", "take fewer")
        gpus = present // devices
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.places = parallel or gpus or max(1, cores // threads)
        self.threads, self.memory, self.devices = threads, memory, devices
        self.reuse = reuse
        self._idle: dict[int, subprocess.Popen[bytes]] = {}
        self._measured = False

    def run(
        self, folders: Sequence[Path], needs: Mapping[Path, Path], tick: Callable[[], None]
    ) -> list[Outcome]:
        waiting = list(folders)
        running: list[_Running] = []
        failed: list[Outcome] = []
        try:
            while waiting or running:
                for one in [r for r in running if self._is_over(r)]:
                    running.remove(one)
                    if one.process.poll() is None:
                        self._idle[one.slot] = one.process
                    failed += self._ended(one)
                while ready := [f for f in waiting if _is_ready(f, needs)]:
                    if not self._room(running):
                        break
                    taken = {r.slot for r in running}
                    slot = next(i for i in range(self.places) if i not in taken)
                    running.append(self._start(ready[0], slot))
                    waiting.remove(ready[0])
                if not running and not ready:
                    # The remaining runs are students whose teacher failed.
                    failed += [_untaught(folder, needs) for folder in waiting]
                    break
                tick()
                time.sleep(TICK)
        finally:
            left = [*(one.process for one in running), *self._idle.values()]
            self._idle.clear()
            for process in left:
                process.terminate()
            for process in left:
                _end(process)
        tick()
        return failed

    def _room(self, running: Sequence[_Running]) -> bool:
        if not running:
            return True
        # A run that has just started has not yet allocated what it will need.
        promised = sum(max(0.0, self.memory - _resident(r.process.pid)) for r in running)
        return len(running) < self.places and _available() - promised >= self.memory

    def _is_over(self, one: _Running) -> bool:
        return one.process.poll() is not None or (self.reuse and (one.folder / RECORD).is_file())

    def _start(self, folder: Path, slot: int) -> _Running:
        process = self._idle.pop(slot, None)
        if process is None or process.poll() is not None:
            process = self._process(folder, slot)
        if process.stdin is not None:
            process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            process.stdin.flush()
        return _Running(folder, process, slot)

    def _process(self, folder: Path, slot: int) -> subprocess.Popen[bytes]:
        own = {PARENT: str(os.getpid()), "OMP_NUM_THREADS": str(self.threads)}
        if torch.cuda.is_available():
            first = slot * self.devices
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            ids = visible.split(",") if visible else [str(i) for i in range(_gpus())]
            chosen = [ids[i % len(ids)] for i in range(first, first + self.devices)]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        with refuse_link(folder / LOG).open("wb") as log:
            return subprocess.Popen(
                [*_WORK] if self.reuse else [*_WORK, str(folder)],
                stdin=subprocess.PIPE if self.reuse else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
            )

    def _ended(self, one: _Running) -> list[Outcome]:
        code = one.process.poll() or 0
        if code != 0 or not (one.folder / RECORD).is_file():
            reason = _last_line(one.folder / LOG)
            if code < 0:
                reason = f"killed by signal {-code} (out of memory?): {reason}"
            return [Outcome(one.folder, reason)]
        peak = one.folder / PEAK
        if peak.is_file():
            resident = float(json.loads(peak.read_text())["resident"])
            self.memory = max(self.memory, resident) if self._measured else resident
            self._measured = True
        return []


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        # A killed run continues from its last checkpoint in the next call.
        process.kill()
        process.wait()


def _gpus() -> int:
    return max(1, torch.cuda.device_count())


def _available() -> float:
    """Bytes free for a new process; unlimited if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(float(n.split()[1]) for n in lines if n.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float("inf")


def _resident(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _last_line(log: Path) -> str:
    """The last line that a failed process printed: its error."""
    if not log.is_file():
        return "it ended without a word"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return said[-1].removeprefix("solo-ext: ") if said else "it ended without a word"


class Job:
    """A job of the array; a pre-empted one is queued again and continues."""

    def __call__(self, folder: str) -> None:
        work(Path(folder))

    def checkpoint(self, folder: str) -> Any:
        """What submitit queues when SLURM pre-empts the job."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Job(), folder)


class SlurmLauncher(Launcher):
    """An array of jobs through submitit.

    Args:
        parallel: number of jobs at once; null lets SLURM decide.
        threads: CPU threads of a run.
        logs: folder of submitit's files.
        options: options of submitit's executor, such as ``slurm_partition`` and ``timeout_min``.
        cluster: ``slurm``; ``local`` runs the same jobs as processes on this machine.
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
        first = [f for f in folders if _is_ready(f, needs)]
        students = [f for f in folders if f not in first]
        failed = self._array(first, tick)
        taught = [f for f in students if _is_ready(f, needs)]
        failed += self._array(taught, tick)
        return failed + [_untaught(f, needs) for f in students if f not in taught]

    def _queued(self, folder: Path) -> Any | None:
        """The job that an earlier call started for a run, if it has not ended."""
        file = folder / _JOB
        if not file.is_file():
            return None
        job = self.executor.job_class(self.executor.folder, file.read_text())
        return None if job.done(force_check=True) else job

    def _array(self, folders: Sequence[Path], tick: Callable[[], None]) -> list[Outcome]:
        """Runs the array; jobs survive an interrupted call, and the next call waits for them."""
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
