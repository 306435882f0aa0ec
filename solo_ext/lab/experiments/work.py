"""One run of a benchmark: ``python -m solo_ext.lab.experiments.work FOLDER``.

Without ``FOLDER`` the process does one run after another, reading folders from standard input.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import shutil
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext import host
from solo_ext.core.errors import UserError, in_one_line, show_messages
from solo_ext.core.files import append_lines, locked, read_jsonl, refuse_link, write_text
from solo_ext.data.reading import Images
from solo_ext.lab.evaluation.context import EvalContext, context_of, open_context
from solo_ext.lab.evaluation.evaluate import headline
from solo_ext.lab.evaluation.models import PIXELS, Model, RawPixels
from solo_ext.lab.evaluation.protocol import measure
from solo_ext.lab.evaluation.suite import read_suite_settings
from solo_ext.lab.experiments.plan import PlannedRun
from solo_ext.lab.experiments.records import Curves, Memory, Record, code_version
from solo_ext.lab.experiments.settings import suite_settings
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import ENVIRONMENT, METRICS, environment, run_digest

PLANNED, RECORD, PEAK = "planned.json", "record.json", "peak_memory.json"
EPOCHS, STARTS, LOG, _LOCK = "epochs.jsonl", "starts.jsonl", "work.log", ".work.lock"
PARENT = "SOLO_EXT_BENCHMARK_PARENT"
"""Environment variable with the id of the process that started this one."""
_WAIT = 30.0
# Built-in methods log by step and by epoch; Lightning appends `_epoch` to the latter.
_LOSS = re.compile(r"train_(?!class_)(\w*loss|neg_cos_sim)(_epoch)?")


def work(folder: Path) -> Record | None:
    """Trains and measures the run of ``planned.json``, and writes ``record.json``.

    Work that an earlier process has finished is not repeated.

    Args:
        folder: the run directory; that of a teacher is beside it.

    Returns:
        The record; ``None`` in the further ranks of a run.

    Raises:
        UserError: a config that cannot run, or another process using the folder.
    """
    planned = PlannedRun(**json.loads((folder / PLANNED).read_text()))
    torch.set_num_threads(planned.threads)
    if int(os.environ.get("LOCAL_RANK", 0)):
        # Lightning started this further rank, which only trains: rank 0 has the lock and writes.
        _train(prepare(_config(planned, folder)), folder)
        return None
    with locked(folder / _LOCK, _WAIT):
        file = folder / RECORD
        if not file.is_file():
            # Read the commit before training: it may change meanwhile.
            start = {"code": code_version(), "environment": _environment()}
            append_lines(folder / STARTS, [start])
            record = _run(planned, folder)
            write_text(file, json.dumps(record, indent=1))
        found: Record = json.loads(file.read_text())
        return found


class EpochTimes(Callback):
    """Writes a line per epoch: its number from 0, its images, its seconds of training.

    Time counts from the start of the epoch, an E-step included, to its last batch: validation,
    evaluation and checkpoints come later. If a killed run repeats an epoch, its second line counts.

    Args:
        file: the file.
        batch_size: of one process.
    """

    def __init__(self, file: Path, batch_size: int) -> None:
        self.file, self.batch_size = file, batch_size
        self._begin = self._end = 0.0
        self._batches = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = self._end = time.monotonic()
        self._batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self._end = time.monotonic()
        self._batches += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        line = {
            "epoch": trainer.current_epoch,
            "images": self._batches * self.batch_size * trainer.world_size,
            "seconds": round(self._end - self._begin, 4),
        }
        append_lines(self.file, [line])


def read_epochs(file: Path) -> list[dict[str, Any]]:
    """One entry per finished epoch, in order; empty without a file."""
    found = {entry["epoch"]: entry for entry in read_jsonl(file) if "epoch" in entry}
    return [found[epoch] for epoch in sorted(found)]


def _config(planned: PlannedRun, folder: Path) -> dict[str, Any]:
    config = dict(planned.config)
    if planned.teacher is not None:
        config["method_kwargs"]["teacher"]["path"] = str(folder.parent / planned.teacher)
    return config


def _train(prepared: Prepared, folder: Path) -> Path:
    times = EpochTimes(folder / EPOCHS, prepared.run.optimizer.batch_size)
    result = pretrain(prepared, run_dir=folder, callbacks=[times], show_progress=False)
    if result.checkpoint is None:
        raise UserError("checkpoint.enabled=false: a benchmark evaluates the last checkpoint")
    return result.checkpoint


def _run(planned: PlannedRun, folder: Path) -> Record:
    config = _config(planned, folder)
    prepared = prepare(config)
    device = "cuda" if torch.cuda.is_available() and config["accelerator"] != "cpu" else "cpu"
    memory: Memory | None = None
    shared, chosen = read_suite_settings({**suite_settings(planned.evaluation), "device": device})
    if planned.baseline is None:
        checkpoint = _train(prepared, folder)
        memory = _peak(folder / PEAK)
        # Lightning has ended the other ranks, so rank 0 evaluates alone.
        subject = open_context(str(checkpoint), shared).alone()
    else:
        subject = context_of(_baseline(planned, prepared, folder), shared, device)
    scores: dict[str, float] = {}
    for name, protocol in chosen.items():
        if protocol is None:
            raise UserError(f"evaluation.{name}: it cannot do without settings")
        scores |= _named(name, measure(protocol, subject))
    shutil.rmtree(folder / "features", ignore_errors=True)
    return _record(planned, prepared, subject, folder, memory, scores)


def _baseline(planned: PlannedRun, prepared: Prepared, folder: Path) -> Model:
    cfg = prepared.run
    if planned.baseline == "raw-pixels":
        size = cfg.augmentations[0].crop_size
        return Model(PIXELS, RawPixels(), 3 * size * size, cfg, PIXELS, PIXELS, None, folder)
    pl.seed_everything(planned.seed, verbose=False)
    method = prepared.method(prepared.cfg)
    backbone, width = method.backbone, method.features_dim
    digest = f"random-{planned.key}"
    return Model("random-backbone", backbone, width, cfg, "random", digest, None, folder)


def _named(protocol: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Headline numbers with short names: ``knn``, ``lowshot_10_per_class``."""
    found = {}
    for key, value in headline(protocol, rows).items():
        rest = key.replace("acc1", "").strip("_")
        name = f"{protocol}_{rest}" if rest else protocol
        if not math.isfinite(value):
            raise RuntimeError(f"{name} is {value}: the run has no usable features")
        found[name] = float(value)
    return found


def _most_resident() -> int:
    """Peak memory in bytes; ``ru_maxrss`` would include what the parent process used."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(n.split()[1]) for n in lines if n.startswith("VmHWM:"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak(file: Path) -> Memory:
    """Peak of this process, or of an earlier part of the run if that was higher."""
    resident = _most_resident()
    cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier = json.loads(file.read_text())
        resident = max(resident, earlier["resident"])
        cuda = None if cuda is None else max(cuda, earlier["cuda"] or 0)
    write_text(file, json.dumps({"resident": resident, "cuda": cuda}))
    return {"resident": resident, "cuda": cuda}


def _record(
    planned: PlannedRun,
    prepared: Prepared,
    subject: EvalContext,
    folder: Path,
    memory: Memory | None,
    scores: dict[str, float],
) -> Record:
    epochs, starts = read_epochs(folder / EPOCHS), read_jsonl(folder / STARTS)
    trained = planned.baseline is None
    seconds = sum(e["seconds"] for e in epochs)
    images: Images = prepared.train
    return {
        "key": planned.key,
        "config_digest": run_digest(prepared.run),
        "benchmark": planned.benchmark,
        "dataset": planned.dataset,
        "budget": planned.budget,
        "row": planned.row,
        "kind": planned.kind,
        "method": None if planned.baseline == "raw-pixels" else prepared.run.method,
        "seed": planned.seed,
        "config": _without_paths(prepared.run.model_dump(), planned),
        "evaluation": planned.evaluation,
        "threads": planned.threads,
        "code": _code(starts),
        "environment": _with_patches(starts[0]["environment"], folder),
        "parts": len(starts),
        "epochs": len(epochs) if trained else 0,
        "images": len(images),
        "seconds": round(seconds, 3) if trained else None,
        "images_per_second": (
            round(sum(e["images"] for e in epochs) / seconds, 2) if trained and seconds else None
        ),
        "memory": memory,
        "scores": scores,
        "curves": _curves(folder, epochs),
        "losses": _losses(folder),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _with_patches(environment: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Adds the patches recorded by the run itself, which this process did not know at its start."""
    file = folder / ENVIRONMENT
    patches = json.loads(file.read_text())["host"]["patches"] if file.is_file() else []
    return {**environment, "host": {**environment["host"], "patches": patches}}


def _environment() -> dict[str, Any]:
    return environment(host.load().info)


def _code(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Code of the first start; it counts as changed if a later part ran other code."""
    first = dict(starts[0]["code"])
    return first | ({"changed": True} if any(s["code"] != first for s in starts) else {})


def _without_paths(given: dict[str, Any], planned: PlannedRun) -> dict[str, Any]:
    """Removes paths of data: records are published."""
    data = {k: v for k, v in given["data"].items() if k not in ("train_path", "val_path")}
    kwargs = dict(given["method_kwargs"])
    if planned.teacher is not None:
        kwargs["teacher"] = {**kwargs["teacher"], "path": planned.teacher}
    return {**given, "data": data, "method_kwargs": kwargs}


def _curves(folder: Path, epochs: list[dict[str, Any]]) -> Curves | None:
    file = folder / METRICS
    if not file.is_file():
        return None
    lines = {m["epochs_done"]: m for m in read_jsonl(file) if "epochs_done" in m}
    if not lines:
        return None
    done = sorted(int(e) for e in lines)
    total, passed = [0.0], 0.0
    for entry in epochs:
        passed += entry["seconds"]
        total.append(round(passed, 3))
    names = sorted({k for m in lines.values() for k in m if k.startswith("online_")})
    short = {
        n: n.removeprefix("online_").replace("acc1", "").strip("_").replace("__", "_")
        for n in names
    }
    return {
        "epochs": done,
        "seconds": [total[min(e, len(total) - 1)] for e in done],
        "scores": {short[n]: [lines[e].get(n) for e in done] for n in names},
    }


def _losses(folder: Path) -> dict[str, list[float | None]]:
    """Every loss that the method logged, by epoch."""
    found: dict[str, dict[int, float | None]] = {}
    file = folder / METRICS
    for line in read_jsonl(file) if file.is_file() else ():
        for key, value in line.items():
            if match := _LOSS.fullmatch(key):
                found.setdefault(match[1], {})[int(line["epoch"])] = value
    return {
        name: [values.get(epoch) for epoch in range(max(values) + 1)]
        for name, values in sorted(found.items())
    }


def _end_with_parent() -> None:
    """Ends this process when the one that started it has ended for any reason."""
    if PARENT not in os.environ:
        return
    parent = os.getppid()
    # Lightning starts further ranks from the first one, which is then their parent.
    if "LOCAL_RANK" not in os.environ and parent != int(os.environ[PARENT]):
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _one_after_another() -> None:
    for line in sys.stdin:
        folder = Path(json.loads(line))
        with refuse_link(folder / LOG).open("wb") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        work(folder)


def main() -> int:
    """Does the run named on the command line, or the runs named on standard input."""
    _end_with_parent()
    show_messages()

    def command() -> int:
        if len(sys.argv) > 1:
            work(Path(sys.argv[1]))
        else:
            _one_after_another()
        return 0

    return in_one_line(command, "the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
