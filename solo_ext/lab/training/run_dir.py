"""Run directories: where they are, and their files, with names that upstream's scripts know."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from solo_ext import __version__, host
from solo_ext.config.check import result_settings
from solo_ext.config.schema import RunConfig
from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import ConfigError, NoSuchRun, UserError
from solo_ext.core.files import CHECKPOINT_NAME, read_text
from solo_ext.core.machine import cores
from solo_ext.lab.training.signals import slurm_job
from solo_ext.losses import LOSSES
from solo_ext.methods.registry import METHODS

logger = logging.getLogger(__name__)
RUN_DIR = "SOLO_EXT_RUN_DIR"
"""Environment variable by which a process passes the directory to processes that it starts."""
CONFIG, ARGS = "config.yaml", "args.json"
LOCK = ".lock"
METRICS, EPOCHS, ENVIRONMENT = "metrics.jsonl", "epochs.jsonl", "environment.json"
WEIGHTS = "weights.json"
"""What the backbone started from, if the config has ``backbone.weights``."""
TENSORBOARD, CSV, MLFLOW = "tensorboard", "csv", "mlflow.db"
LOGGERS = {TENSORBOARD, CSV, MLFLOW, "wandb"}
"""Folders and files that loggers create, some before there is anything to log."""
PREVIOUS = ".previous"
"""Suffix of the checkpoint before the last one; scripts that look for ``.ckpt`` ignore it."""
PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "timm",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scikit-learn",
)
_WAIT = timedelta(minutes=10)
_calls = itertools.count()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file and its epoch, from 0; ``step`` is ``None`` at the end of an epoch.

    >>> Checkpoint(Path("pcl-ep=3-step=84.ckpt"), epoch=3, step=84).step
    84
    """

    path: Path
    epoch: int
    step: int | None


def file_name(name: str) -> str:
    """The name of a run as part of a file name, without characters that lead to other folders.

    >>> file_name("../my run")
    '..-my-run'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _base_run_dir(run: RunConfig) -> Path:
    """``<checkpoint.dir>/<method>/<name>-<digest>``; the digest covers settings of results."""
    text = json.dumps(result_settings(run.model_dump()), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path(run.checkpoint.dir, run.method, f"{file_name(run.name)}-{digest}")


def _choose_run_dir(run: RunConfig) -> Path:
    """The directory of :func:`_base_run_dir`, with a number appended if it exists already."""
    first = path = _base_run_dir(run)
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return _earlier_run_dir(run) or path


def _earlier_run_dir(run: RunConfig) -> Path | None:
    """With ``auto_resume.enabled``, the config's directory with the newest checkpoint.

    It is ``None`` if there is none, or if it is older than ``auto_resume.max_hours``.
    """
    base, automatic = _base_run_dir(run), run.auto_resume
    folders = base.parent.glob(f"{base.name}*") if automatic.enabled else ()
    found = [(c.path.stat().st_mtime, f) for f in folders for c in checkpoints(f)[-1:]]
    newest, folder = max(found, default=(0.0, None))
    return folder if time.time() - newest < 3600 * automatic.max_hours else None


def agreed_run_dir(run: RunConfig) -> Path:
    """The directory of a run for which none was given.

    It is ``<checkpoint.dir>/<method>/<name>-<digest>``, with a number added for each further run of
    the config. All processes of a run and every start of its job use the same one:

    - processes started by Lightning use the directory of the process that started them;
    - processes of ``torchrun`` use what the first one chose, also after a restart;
    - a batch job of SLURM adds its number, so that it continues when it is requeued.

    >>> from unittest import mock
    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/pcl"))
    >>> with mock.patch.dict(os.environ, {RUN_DIR: "runs/pcl/mine"}):
    ...     agreed_run_dir(run)
    PosixPath('runs/pcl/mine')
    """
    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    job = slurm_job()
    if job is not None and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        # Also for torchrun within the job, whose store a requeued job does not find again.
        path = _base_run_dir(run)
        return _earlier_run_dir(run) or path.with_name(f"{path.name}-job-{job}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _of_torchrun(run)
    return _choose_run_dir(run)


def _of_torchrun(run: RunConfig) -> Path:
    stores: Any = dist
    # The store belongs to the agent that started the processes, and outlives them.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = stores.PrefixStore(
        "solo_ext", stores.TCPStore(address, port, is_master=False, timeout=_WAIT)
    )
    key = f"run_dir/{next(_calls)}"
    if int(os.environ["RANK"]) == 0 and not store.check([key]):
        store.set(key, os.fspath(_choose_run_dir(run).absolute()))
    return Path(store.get(key).decode())


def checkpoints(run_dir: Path, *, previous: bool = False) -> list[Checkpoint]:
    """Checkpoints of a run directory, the most advanced last; ``previous`` adds the previous one.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("pcl-ep=0.ckpt", "pcl-ep=1.ckpt", "pcl-ep=1-step=25.ckpt", "weights.pth"):
    ...     (folder / name).touch()
    >>> [held.path.name for held in checkpoints(folder)]
    ['pcl-ep=0.ckpt', 'pcl-ep=1-step=25.ckpt', 'pcl-ep=1.ckpt']
    """
    found = []
    for path in run_dir.glob("*.ckpt*"):
        held_back = path.name.endswith(PREVIOUS)
        match = CHECKPOINT_NAME.search(path.name.removesuffix(PREVIOUS))
        if match and (previous or not held_back):
            step = match["step"]
            found.append(Checkpoint(path, int(match["epoch"]), int(step) if step else None))
    # The checkpoint at the end of an epoch comes after those within it.
    return sorted(found, key=lambda one: (one.epoch, one.step is None, one.step or 0))


def resume_hint(run_dir: Path) -> str:
    """Tells the user how to continue after a run ended early.

    >>> resume_hint(Path("nowhere"))
    'nothing is saved yet: start it again'
    """
    if checkpoints(run_dir, previous=True):
        return f"`solo-ext pretrain --resume {run_dir}` goes on"
    return "nothing is saved yet: start it again"


def check_run_dir(run_dir: Path) -> None:
    """Refuses a folder with files that are not a run's, because they would be replaced.

    Raises:
        ConfigError: it has files that no run left before its first batch, and no record of a run's
            environment.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "thesis.tex").touch()
    >>> check_run_dir(folder)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: --run-dir='...': it holds 'thesis.tex' and is no run of ...
    """
    names: set[str] = set()
    with contextlib.suppress(OSError):
        # If the folder cannot be read, the run will refuse it when it starts.
        names = {file.name for file in run_dir.iterdir()}
    # A run that ended before its first batch may have left the folder of its logger, its lock, and
    # the output of an evaluation before training.
    early = {LOCK, METRICS, "online", *LOGGERS} if LOCK in names else LOGGERS
    # A copy of a run may lack hidden files such as the lock.
    if names <= early or _recorded(run_dir / ENVIRONMENT) is not None:
        return
    raise ConfigError(
        "--run-dir",
        str(run_dir),
        f"it holds {min(names - early)!r} and is no run of `solo-ext pretrain`",
        "name an empty folder, a new one, or a run to go on with",
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config that a run of this package was started with.

    Raises:
        UserError: the folder is no run directory of ``solo-ext pretrain``, or its config is not a
            mapping.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / CONFIG).write_text("method: pcl")
    >>> read_config(folder)
    {'method': 'pcl'}
    """
    if not os.path.lexists(run_dir):
        raise NoSuchRun(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"run directory {str(run_dir)!r}: no such folder")
    file = run_dir / CONFIG
    if not file.is_file():
        raise UserError(
            f"run directory {str(run_dir)!r}: no {CONFIG} in it; give a folder that "
            "`solo-ext pretrain` wrote"
        )
    loaded = read_yaml(file)
    if not isinstance(loaded, dict):
        raise UserError(f"{file}: not a config; the file was changed or cut short")
    return loaded


def package_version(name: str) -> str | None:
    """Version of an installed distribution; ``None`` if it is not installed.

    >>> package_version("no-such-package") is None
    True
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def extensions() -> dict[str, str]:
    """Versions of other packages with methods or losses, and digests of the files that have them.

    An editable install keeps its version when its code changes.

    >>> from types import SimpleNamespace
    >>> from solo_ext.core.registry import Entry
    >>> sys.modules["theirs"] = SimpleNamespace(__name__="theirs", __file__="theirs.py")
    >>> theirs = type("Theirs", (), {"__module__": "theirs"})
    >>> METHODS.add(Entry("theirs", theirs, origin="their-package"))
    >>> extensions()
    {'their-package': 'of no version (e3b0c442)'}
    >>> del METHODS["theirs"], sys.modules["theirs"]
    """
    files: dict[str, set[str]] = {}
    for entry in (*METHODS.values(), *LOSSES.values()):
        module = sys.modules.get(entry.target.__module__)
        if module is not None and module.__name__.partition(".")[0] != "solo_ext":
            files.setdefault(entry.origin, set()).add(str(module.__file__))
    found = {}
    for origin, paths in files.items():
        code = b"".join(Path(path).read_bytes() for path in sorted(paths) if Path(path).is_file())
        digest = hashlib.sha256(code).hexdigest()[:8]
        found[origin] = f"{package_version(origin) or 'of no version'} ({digest})"
    return found


def environment(patches: Sequence[str] = ()) -> dict[str, Any]:
    """The environment of a run: host and its applied patches, versions, processor, accelerators.

    >>> found = environment(["online-knn"])
    >>> found["host"]["patches"], sorted(found["packages"])[0]
    (['online-knn'], 'hydra-core')
    """
    info = host.load().info
    host_of_run = {key: getattr(info, key) for key in ("generation", "version", "fingerprint")}
    return {
        "solo_ext": __version__,
        "host": {**host_of_run, "patches": list(patches)},
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES} | extensions(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def warn_of_changes(run_dir: Path, patches: Sequence[str]) -> None:
    """Warns of what has changed since the earlier part of a run, if it can change the results.

    >>> warn_of_changes(Path("nowhere"), patches=[])  # a run that begins has no earlier part
    """
    before = _recorded(run_dir / ENVIRONMENT)
    if before is None:
        return
    then, now = (result_settings(one) for one in (before, environment(patches)))
    changes = [
        f"{key}: {then.get(key)} -> {now.get(key)}"
        for key in now
        if then.get(key) != now[key] and key not in ("cores", "platform", "python")
    ]
    if changes:
        logger.warning(
            f"goes on in another environment ({'; '.join(changes)}): the run ends with other "
            "numbers than without the interruption, by rounding or by more"
        )


def recorded_version(run_dir: Path) -> str | None:
    """The version of this package that last trained a run; ``None`` if there is no record of it.

    >>> recorded_version(Path("nowhere")) is None
    True
    """
    held = _recorded(run_dir / ENVIRONMENT)
    return None if held is None else str(held["solo_ext"])


def _recorded(file: Path) -> dict[str, Any] | None:
    """The environment that a run has recorded; ``None`` if there is no record of one."""
    try:
        held = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError, UserError):
        return None
    known = isinstance(held, dict) and {"solo_ext", "host"} <= held.keys()
    return held if known else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
