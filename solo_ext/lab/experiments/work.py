"""Executes one run of a benchmark; its other ranks run this module with the folder as argument."""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import nn

from solo_ext.core.errors import show_messages
from solo_ext.core.files import append_lines, locked, read_jsonl, write_text
from solo_ext.data.workers import JOB_SIGNALS
from solo_ext.lab.ending import in_one_line
from solo_ext.lab.evaluation.context import open_context
from solo_ext.lab.evaluation.models import PIXELS, Model
from solo_ext.lab.evaluation.protocol import measure
from solo_ext.lab.evaluation.suite import read_suite_settings
from solo_ext.lab.experiments.plan import PlannedRun
from solo_ext.lab.experiments.records import Curves, Record, code_version
from solo_ext.lab.experiments.settings import short_name, suite_settings
from solo_ext.lab.training.epoch_log import read_epochs
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import ENVIRONMENT, METRICS, environment
from solo_ext.pretrained.weights import weights_digest

PLANNED, RECORD, LOG, _LOCK = "planned.json", "record.json", "work.log", ".work.lock"
CODE = "code.jsonl"
_WAIT = 30.0


def work(folder: Path) -> None:
    """Trains and measures the run of ``planned.json``, and writes ``record.json``.

    Work that an earlier process has finished is not repeated.

    Raises:
        UserError: a config that cannot run, or another process using the folder.
    """
    planned = PlannedRun(**json.loads((folder / PLANNED).read_text()))
    config = dict(planned.config)
    if planned.teacher is not None:
        config["method_kwargs"]["teacher"]["path"] = str(folder.parent / planned.teacher)
    torch.set_num_threads(planned.threads)
    if int(os.environ.get("LOCAL_RANK", 0)) or int(os.environ.get("NODE_RANK", 0)):
        # Other ranks, started by Lightning or on another node, only train; rank 0 writes.
        if planned.baseline is None:
            _train(prepare(config), folder)
        return
    with locked(folder / _LOCK, _WAIT):
        if not (folder / RECORD).is_file():
            # Read the commit before training: it may change meanwhile.
            append_lines(folder / CODE, [code_version()])
            record = _run(planned, prepare(config), folder)
            write_text(folder / RECORD, json.dumps(record, indent=1))


def _train(prepared: Prepared, folder: Path) -> Path:
    result = pretrain(prepared, run_dir=folder, show_progress=False)
    assert result.checkpoint is not None  # the plan has refused `checkpoint.enabled=false`
    return result.checkpoint


def _run(planned: PlannedRun, prepared: Prepared, folder: Path) -> Record:
    on_cpu = prepared.run.accelerator == "cpu" or not torch.cuda.is_available()
    device = "cpu" if on_cpu else "cuda"
    shared, chosen = read_suite_settings({**suite_settings(planned.evaluation), "device": device})
    trained = planned.baseline is None
    model = str(_train(prepared, folder)) if trained else _baseline(planned, prepared, folder)
    context = open_context(model, shared)
    where = json.loads((folder / ENVIRONMENT).read_text()) if trained else environment()
    scores = {
        short_name(f"{name}_{key}"): float(value)
        for name, protocol in chosen.items()
        for key, value in protocol.headline(measure(protocol, context)).items()
    }
    for name, score in scores.items():
        if not math.isfinite(score):
            raise RuntimeError(f"{name} is {score}: the run has no usable features")
    shutil.rmtree(folder / "features", ignore_errors=True)
    codes = read_jsonl(folder / CODE)
    epochs = read_epochs(folder)
    # Earlier versions did not time every epoch, and the seconds of some are not those of the run.
    timed = trained and len(epochs) == context.model.epoch
    seconds = sum(e["seconds"] for e in epochs)
    of_plan = {k: v for k, v in vars(planned).items() if k in Record.__annotations__}
    measured = {
        "config": _without_paths(prepared.run.model_dump(), planned),
        # Record the code of the first start, as `changed` if a later start ran other code.
        "code": codes[0] | ({"changed": True} if codes != codes[:1] * len(codes) else {}),
        "environment": where,
        "epochs": context.model.epoch if trained else 0,
        "images": len(prepared.train),
        "seconds": round(seconds, 3) if timed else None,
        "images_per_second": (
            round(sum(e["images"] for e in epochs) / seconds, 2) if timed else None
        ),
        "memory": _peaks(epochs) if trained else None,
        "scores": scores,
        "curves": _curves(folder, epochs) if timed else None,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return cast(Record, of_plan | measured)


def _baseline(planned: PlannedRun, prepared: Prepared, folder: Path) -> Model:
    cfg = prepared.run
    if planned.baseline == "raw-pixels":
        size = cfg.augmentations[0].crop_size
        return Model(PIXELS, nn.Flatten(), 3 * size * size, cfg, PIXELS, PIXELS, None, folder)
    pl.seed_everything(planned.seed, verbose=False)
    method = prepared.method(prepared.cfg)
    backbone, width = method.backbone, method.features_dim
    digest = f"random-{planned.key}"
    return Model("random-backbone", backbone, width, cfg, "random", digest, None, folder)


def _peaks(epochs: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    return {
        kind: max((e[kind] for e in epochs if e.get(kind)), default=None)
        for kind in ("resident", "cuda")
    }


def _without_paths(given: dict[str, Any], planned: PlannedRun) -> dict[str, Any]:
    """Removes paths of data from a config, because records are published."""
    data = {k: v for k, v in given["data"].items() if k not in ("train_path", "val_path")}
    kwargs = dict(given["method_kwargs"])
    if planned.teacher is not None:
        kwargs["teacher"] = {**kwargs["teacher"], "path": planned.teacher}
    backbone = dict(given["backbone"])
    if "weights" in backbone:
        backbone["weights"] = weights_digest(backbone["weights"]) or backbone["weights"]
    return {**given, "backbone": backbone, "data": data, "method_kwargs": kwargs}


def _curves(folder: Path, epochs: Sequence[Mapping[str, Any]]) -> Curves | None:
    """Scores measured during training, under the same names as those after training."""
    lines = {int(m["epochs_done"]): m for m in read_jsonl(folder / METRICS) if "epochs_done" in m}
    if not lines:
        return None
    done = sorted(lines)
    total = [0.0, *itertools.accumulate(entry["seconds"] for entry in epochs)]
    names = sorted({k for m in lines.values() for k in m if k.startswith("online_")})
    return {
        "epochs": done,
        "seconds": [round(total[min(e, len(total) - 1)], 3) for e in done],
        "scores": {
            short_name(n.removeprefix("online_")): [lines[e].get(n) for e in done] for n in names
        },
    }


def work_in_process(folder: Path, visible: str | None) -> None:
    """Executes a run in its own process of :mod:`multiprocessing`, and exits that process.

    Args:
        folder: the run directory; what is printed goes to its log.
        visible: the GPUs of the run, as ``CUDA_VISIBLE_DEVICES`` has them.
    """
    # The fork server, which started this process, ignores the job's signals; this process must not.
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # Reset the start method that the fork server set: loader workers start as in any run.
    multiprocessing.set_start_method(None, force=True)
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Standard input becomes a pipe that closes when the launcher ends for any reason. Other ranks
    # inherit it.
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    os.dup2(launcher.sentinel, 0)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    # Within a SLURM job, Lightning would take its number of tasks for that of the run's processes.
    os.environ.pop("SLURM_NTASKS", None)
    # Lightning derives the command line of other ranks from these two.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)
    sys.argv[1:] = [str(folder)]
    code = main()
    # A normal exit would wait for loader workers that are left after an error.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    os.read(0, 1)
    os._exit(1)


def main() -> int:
    """Executes the run of the folder on the command line; exits if standard input closes."""
    # Ignore Ctrl-C: the launcher receives it too, and ends its runs by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    show_messages()

    def command() -> int:
        work(Path(sys.argv[1]))
        return 0

    return in_one_line(command, "the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
