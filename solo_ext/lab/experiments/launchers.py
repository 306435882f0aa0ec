"""Starts the runs of a benchmark: on this machine, as an array of SLURM jobs, or by Ray."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from solo_ext.core.errors import ConfigError, UserError, first_line
from solo_ext.core.files import open_regular, refuse_link, write_text
from solo_ext.core.machine import cores
from solo_ext.data.workers import start_helpers
from solo_ext.lab.experiments.pace import Pace
from solo_ext.lab.experiments.work import LOG, RECORD, work, work_in_process

logger = logging.getLogger(__name__)
Launcher = Callable[[Sequence[Path], Callable[[], None]], dict[Path, str]]
"""``launcher(folders, tick)`` runs every folder that holds ``planned.json``, in that order.

``tick`` is called about twice a second and after the last run. The launcher returns the runs that
failed, each with a reason in one line; a failed run does not stop the others.
"""
TICK = 0.5
_PATIENCE = 30.0
_JOB = "slurm_job"


class LocalLauncher:
    """Executes several runs at once, each in a process on this machine.

    The processes are forks of one that has imported everything, because importing takes longer than
    a small run.

    Args:
        parallel: number of runs at once; null: as many as the GPUs, or else the cores, suffice for.
        threads: CPU threads of a run.
        devices: GPUs, or processes on a CPU, of one run.
        until: when the runs must have ended, as ``time.monotonic()`` counts; those that would not
            end in time are not started, or are stopped.

    Raises:
        ConfigError: more devices than there are GPUs.
    """

    def __init__(
        self, parallel: int | None, threads: int, devices: int = 1, until: float = math.inf
    ) -> None:
        present = torch.cuda.device_count()
        if 0 < present < devices:
            raise ConfigError("--devices", devices, f"there are {present} GPUs", "take fewer")
        self.places = parallel or present // devices or max(1, cores() // (threads * devices))
        self.devices, self.pace = devices, Pace(until)
        # Libraries read the number of threads when they are imported.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload([work.__module__])

    def __call__(self, folders: Sequence[Path], tick: Callable[[], None]) -> dict[Path, str]:
        waiting = list(folders)
        running: dict[int, tuple[Path, ForkServerProcess]] = {}
        failed: dict[Path, str] = {}
        if waiting:
            # A signal to the whole job must not end the process that runs are forked from.
            start_helpers("forkserver")
        try:
            while waiting or running:
                for place in range(self.places):
                    if place in running and running[place][1].exitcode is not None:
                        folder, process = running.pop(place)
                        failed |= _ended(folder, process.exitcode or 0)
                    if place in running:
                        continue
                    if (due := self.pace.next_of(waiting, idle=not running)) is not None:
                        waiting.remove(due)
                        running[place] = due, self._start(due, place)
                tick()
                time.sleep(TICK)
                self._keep_to_limit(running)
                if not running and self.pace.next_of(waiting, idle=True) is None:
                    break
        finally:
            _stop([process for _, process in running.values()])
        tick()
        return failed

    def _keep_to_limit(self, running: dict[int, tuple[Path, ForkServerProcess]]) -> None:
        """Stops runs that would not end within the limit; they save first."""
        # A run that has just ended is left to the loop.
        going = {place: run for place, run in running.items() if run[1].exitcode is None}
        over, late = self.pace.left <= 0, self.pace.superfluous([f for f, _ in going.values()])
        stopped = {place: run for place, run in going.items() if over or run[0] == late}
        _stop([process for _, process in stopped.values()])
        for place, (folder, _) in stopped.items():
            running.pop(place)
            why = "the time is over" if over else "not all runs would end in time"
            logger.info(f"stopped {folder.name}: {why}; the same command goes on with it")
        if stopped:
            self.pace.load_changes([folder for folder, _ in running.values()])

    def _start(self, folder: Path, place: int) -> ForkServerProcess:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if present := torch.cuda.device_count():
            ids = visible.split(",") if visible else [str(i) for i in range(present)]
            first = place * self.devices
            chosen = [ids[i % len(ids)] for i in range(first, first + self.devices)]
            visible = ",".join(chosen)
        refuse_link(folder / LOG).write_bytes(b"")
        self.pace.starts(folder)
        process = self.processes.Process(target=work_in_process, args=(folder, visible))
        process.start()
        return process


def _stop(processes: Sequence[ForkServerProcess]) -> None:
    """Ends runs, which save first."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_PATIENCE)
        if process.exitcode is None:
            # A killed run continues from its last checkpoint in the next call.
            process.kill()
            process.join()


def _ended(folder: Path, code: int, log_name: str = LOG) -> dict[Path, str]:
    """Why an ended run failed (its last printed line), by folder; empty if it succeeded."""
    if code == 0 and (folder / RECORD).is_file():
        return {}
    text, file = "", folder / log_name
    with contextlib.suppress(OSError, UserError), open_regular(refuse_link(file)) as log:
        text = log.read().decode(errors="replace")
    last = _last_line(text).removeprefix("solo-ext: ")
    reason = last or f"it printed nothing, exit code {code}"
    return {folder: f"killed by signal {-code} (out of memory?): {reason}" if code < 0 else reason}


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


class Job:
    """A job of the array; when SLURM pre-empts it, submitit queues what ``checkpoint`` returns."""

    def __call__(self, folder: str) -> None:
        work(Path(folder))

    def checkpoint(self, folder: str) -> Any:
        """Returns the same job, for submitit to queue it again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Job(), folder)


class SlurmLauncher:
    """Executes runs as an array of SLURM jobs, through submitit.

    Args:
        parallel: number of jobs at once; null lets SLURM decide.
        threads: CPU threads of a run.
        logs: folder of submitit's files.
        options: options of submitit's executor, such as ``slurm_partition`` and ``timeout_min``.
        cluster: ``slurm``; ``local`` runs the same jobs as processes on this machine.

    Raises:
        UserError: submitit is not installed, or SLURM is not available.
        ConfigError: an option that submitit refuses.
    """

    def __init__(
        self,
        parallel: int | None,
        threads: int,
        logs: Path,
        options: Mapping[str, Any] | None = None,
        cluster: str = "slurm",
    ) -> None:
        try:
            import submitit

            self.executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        except ImportError:
            raise UserError(
                "--launcher slurm needs submitit, which is not installed: pip install "
                "'solo-ext[benchmark]'"
            ) from None
        except RuntimeError as error:
            raise UserError(f"--launcher slurm: {error}; use --launcher local") from None
        given = {"cpus_per_task": threads, "name": "solo-ext", **(options or {})}
        if parallel is not None and cluster == "slurm":
            given["slurm_array_parallelism"] = parallel
        try:
            self.executor.update_parameters(**given)
        except (TypeError, NameError, ValueError) as error:
            raise ConfigError("--slurm", options, first_line(error)) from None

    def _queued(self, folder: Path) -> Any | None:
        file = folder / _JOB
        if not file.is_file():
            return None
        job = self.executor.job_class(self.executor.folder, file.read_text())
        return None if job.done(force_check=True) else job

    def __call__(self, folders: Sequence[Path], tick: Callable[[], None]) -> dict[Path, str]:
        # Jobs survive an interrupted call, and the next call waits for them.
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
        failed = {}
        for folder, job in jobs.items():
            error = job.exception()
            if error is not None or not (folder / RECORD).is_file():
                failed[folder] = _last_line(str(error or "")) or "no record"
        return failed


class RayLauncher:
    """Executes runs as tasks of a Ray cluster; the run is a child process of its task.

    If a worker or a run is killed or a node is lost, Ray starts the task again, and the run
    continues from its last checkpoint. A run on several nodes has a task on each; the first task
    starts the others, and fails if one of them fails. Runs end when the call that started them
    ends. Without ``RAY_ADDRESS`` or a cluster that this machine belongs to, a cluster of this
    machine is started.

    Args:
        threads: CPU threads of a process.
        devices: devices of one run on each of its nodes.
        options: options of Ray's tasks, such as ``num_gpus``, ``memory`` and ``max_retries``.
        nodes: nodes of one run.

    Raises:
        UserError: Ray is not installed, or its cluster cannot be reached.
        ConfigError: an option that Ray refuses.
    """

    def __init__(
        self,
        threads: int,
        devices: int = 1,
        options: Mapping[str, Any] | None = None,
        nodes: int = 1,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UserError(
                "--launcher ray needs Ray, which is not installed: pip install 'solo-ext[ray]'"
            ) from None
        self.ray = ray
        try:
            if not ray.is_initialized():
                ray.init(include_dashboard=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"--launcher ray: {error}; set RAY_ADDRESS to a cluster, or leave it out"
            ) from None
        gpus = devices if ray.cluster_resources().get("GPU") else 0
        given = {"num_cpus": threads * devices, "num_gpus": gpus, **(options or {})}
        logs = [f"{LOG}.{node}" if node else LOG for node in range(nodes)]
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        module, seconds, here = work.__module__, TICK, os.getcwd()
        changes = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        # No retry after these exit codes: if one of several ranks is lost, the others exit with 1.
        final = (0, 2) if nodes * devices > 1 else (0, 1, 2)

        # Ray pickles this inner function together with what it refers to, so that the worker
        # imports neither this file nor torch.
        def run(folder: str, node: int = 0, **meeting: str) -> tuple[int, str]:
            others: list[Any] = []
            failed: list[Any] = []
            if node == 0 and nodes > 1:
                group = ray.util.get_current_placement_group()
                # After the loss of a node, Ray may have to find another one first.
                while not group.wait(seconds):
                    pass
                with socket.create_server(("", 0)) as free:
                    port = str(free.getsockname()[1])
                meeting = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": port}
                for further in range(1, nodes):
                    there = {"scheduling_strategy": place(group, further), "max_retries": 0}
                    task = ray.remote(**{**given, **there})(run)
                    others.append(task.remote(folder, further, **meeting))
            # SLURM may have started Ray, and Lightning would take its variables for the run's.
            environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
            environ |= {**changes, **meeting, "NODE_RANK": str(node)}
            with open(os.path.join(folder, logs[node]), "ab") as log:
                # This pipe closes when the worker ends for any reason, which ends the run too.
                process = subprocess.Popen(
                    [sys.executable, "-m", module, folder],
                    cwd=here,
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            try:
                # Poll, because Ray cannot cancel a task that waits without a timeout.
                while process.poll() is None and not failed:
                    time.sleep(seconds)
                    done, others = ray.wait(others, num_returns=len(others), timeout=0)
                    failed = [ended for ended in ray.get(done) if ended[0]]
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
            finally:
                for other in others:
                    ray.cancel(other, force=True)
                process.communicate()
            code, log_name = failed[0] if failed else (process.returncode, logs[node])
            if node == 0 and code not in final:
                raise ChildProcessError(code, log_name)
            return code, log_name

        # The first of several tasks raises a RayError if Ray has lost another one.
        again = [ChildProcessError, ray.exceptions.RayError]
        try:
            self.task = ray.remote(**given, retry_exceptions=again)(run)
        except (TypeError, ValueError) as error:
            raise ConfigError("--ray", options, first_line(error)) from None
        takes = {"CPU": given["num_cpus"], "GPU": given["num_gpus"], "memory": given.get("memory")}
        takes |= given.get("resources") or {}
        self.logs, self.place, self.takes = logs, place, {k: v for k, v in takes.items() if v}
        held = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit = sum(all(one.get(k, 0) >= v for k, v in self.takes.items()) for one in held)
        if fit < nodes > 1:
            # Only warn: Ray itself would wait silently, and a cluster may grow.
            logger.warning(
                f"--nodes={nodes}: runs wait for nodes with {self.takes}, of which Ray has {fit}"
            )

    def __call__(self, folders: Sequence[Path], tick: Callable[[], None]) -> dict[Path, str]:
        util = self.ray.util
        tasks: dict[Any, Path] = {}
        groups: dict[Any, Any] = {}
        for folder in folders:
            for name in self.logs:
                refuse_link(folder / name).write_bytes(b"")
            if len(self.logs) == 1:
                tasks[self.task.remote(str(folder))] = folder
                continue
            group = util.placement_group([self.takes] * len(self.logs), "STRICT_SPREAD")
            first = self.task.options(scheduling_strategy=self.place(group, 0))
            task = first.remote(str(folder))
            tasks[task], groups[task] = folder, group
        waiting = list(tasks)
        try:
            while waiting:
                tick()
                done, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=TICK)
                for task in groups.keys() & done:
                    util.remove_placement_group(groups.pop(task))
        finally:
            for task in waiting:
                self.ray.cancel(task)
            if waiting:
                self.ray.wait(waiting, num_returns=len(waiting), timeout=_PATIENCE)
            for group in groups.values():
                util.remove_placement_group(group)
        tick()
        failed: dict[Path, str] = {}
        for task, folder in tasks.items():
            try:
                failed |= _ended(folder, *self.ray.get(task))
            except ChildProcessError as error:
                # The first argument of Ray's error is the error of the task.
                failed |= _ended(folder, *error.args[0].args)
            except self.ray.exceptions.RayError as error:
                failed[folder] = _last_line(str(error))
        return failed
