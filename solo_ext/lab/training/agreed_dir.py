"""One run directory for all processes of a run, and for every start of its job."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from solo_ext.lab.training.run_dir import choose_run_dir, numberless_run_dir

RUN_DIR = "SOLO_EXT_RUN_DIR"
"""Environment variable by which a process tells those that it starts."""
_INTERACTIVE = ("bash", "interactive")
_WAIT = timedelta(minutes=10)
_calls = itertools.count()


def agreed_run_dir(given: Mapping[str, Any]) -> Path:
    """The directory of a run that names none.

    That of :func:`~solo_ext.lab.training.run_dir.choose_run_dir`, but

    - processes that Lightning starts take the one of the process that started them;
    - those of ``torchrun`` take what the first one chose, after a restart too;
    - a batch job of SLURM adds its number, so that it goes on once it is requeued.

    Args:
        given: the checked config.
    """
    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _of_torchrun(given)
    job = _slurm_job()
    if job is not None:
        path = numberless_run_dir(given)
        return path.with_name(f"{path.name}-job-{job}")
    return choose_run_dir(given)


def _of_torchrun(given: Mapping[str, Any]) -> Path:
    stores: Any = dist
    # Of the agent that started the processes; it outlives them.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = stores.PrefixStore(
        "solo_ext", stores.TCPStore(address, port, is_master=False, timeout=_WAIT)
    )
    key = f"run_dir/{next(_calls)}"
    if int(os.environ["RANK"]) == 0 and not store.check([key]):
        store.set(key, os.fspath(choose_run_dir(given).absolute()))
    return Path(store.get(key).decode())


def _slurm_job() -> str | None:
    if os.environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
