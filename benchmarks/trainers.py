"""Real Trainers that take turns, one per thread, a step or an epoch each; or follow each other."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image

from benchmarks.record import Effort
from solo_ext.config.compose import compose
from solo_ext.core.errors import first_line
from solo_ext.lab.training import step_graph
from solo_ext.lab.training.lightning_internals import after_own_hook
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

BATCH, STEPS_PER_EPOCH = 256, 9
CLASSES, _GRID = 10, 8
TEACHERS = "SOLO_EXT_TEACHERS"
"""Names the folder in which configs look for teachers."""
ON_GPU = (
    "backbone.name=resnet18",
    "~backbone.kwargs.channels",
    "~backbone.kwargs.small_stem",
    "precision=bf16-mixed",
    "data.augmentation=batch",
    "data.in_memory=true",
)
"""solo-learn's ResNet-18 with its stem for small images, and crops that no core has to make."""


class Timer(Callback):
    """Times every step, or every epoch, of a run."""

    def __init__(self, per_epoch: bool) -> None:
        self.per_epoch = per_epoch
        self.seconds: list[float] = []

    def _begin(self) -> None:
        self._seconds = stopwatch()

    def _end(self) -> None:
        self.seconds.append(self._seconds())

    def on_train_epoch_start(self, *_: Any) -> None:
        if self.per_epoch:
            self._begin()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.per_epoch:
            self._end()

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.per_epoch:
            self._begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A step ends with the method's own hook, which comes after the callbacks'."""
        if not self.per_epoch:
            after_own_hook(pl_module, lambda *_: self._end())


class Turns(Timer):
    """The same of a run in a thread, which goes on when it is told to."""

    def __init__(self, per_epoch: bool) -> None:
        super().__init__(per_epoch)
        self.running = True
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def turn(self) -> None:
        """Goes on until the next one begins: what lies between, loading, disturbs nobody's."""
        self._go.release()
        self.wait()

    def wait(self) -> None:
        """Until the next one begins, or the run has ended."""
        self._stopped.acquire()

    def leave(self) -> None:
        """The run has ended."""
        self.running = False
        self._stopped.release()

    def _begin(self) -> None:
        self._stopped.release()
        self._go.acquire()
        super()._begin()


def stopwatch() -> Callable[[], float]:
    """Gives the seconds of the processor since now; on a GPU those between two events there."""
    if not torch.cuda.is_available():
        start = time.process_time()
        return lambda: time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def seconds() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return seconds


def train(
    effort: Effort,
    name: str,
    changes: Sequence[str],
    images: Path,
    epochs: int,
    callback: Callback | None = None,
    run_dir: Path | None = None,
) -> None:
    """Trains the method of a CIFAR config on made images, for epochs of nine steps."""
    gpu = effort.device == "cuda"
    settings = [
        "data.dataset=custom",
        f"data.train_path={images}",
        "data.val_path=null",
        "data.augmentation=image",
        "data.in_memory=false",
        "precision=32-true",
        "data.num_workers=0",
        "online_eval.every_n_epochs=0",
        "checkpoint.enabled=false",
        "loggers=[]",
        f"accelerator={'gpu' if gpu else 'cpu'}",
        f"optimizer.batch_size={effort.size(BATCH)}",
        f"max_epochs={epochs}",
        "data.fraction=1.0",
        *(ON_GPU if gpu else ()),
    ]
    run = prepare(compose(f"cifar10_cpu/{name}", [*settings, *changes]))
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [] if callback is None else [callback]
        pretrain(run, run_dir=run_dir or Path(folder), callbacks=callbacks, show_progress=False)


def made_images(count: int, side: int) -> list[Image.Image]:
    """Smooth random images, whose JPEG files are about as large as photographs of their size."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (count, _GRID, _GRID, 3), dtype=np.uint8)
    return [Image.fromarray(c).resize((side, side), Image.Resampling.BICUBIC) for c in coarse]


def write_folders(root: Path, count: int, side: int) -> None:
    """Writes them as JPEG files in class folders, ``<root>/<class>/<number>.jpg``."""
    for number, image in enumerate(made_images(count, side)):
        folder = root / str(number % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.jpg", quality=85)


def training_images(effort: Effort, root: Path, steps: int = STEPS_PER_EPOCH) -> Path:
    """Writes as many images as an epoch of some steps takes."""
    write_folders(root, steps * effort.size(BATCH), 32)
    return root


@contextlib.contextmanager
def a_teacher(effort: Effort) -> Iterator[None]:
    """Trains the teacher of the CIFAR configs for one step, where they look for it."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {TEACHERS: folder}):
        images = training_images(effort, Path(folder) / "images", steps=1)
        changes = ("checkpoint.enabled=true", "scheduler.warmup_epochs=0")
        train(effort, "teacher", changes, images, 1, run_dir=Path(folder) / "cifar10_cpu")
        yield


class _Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def time_one_by_one(
    effort: Effort, runs: Mapping[str, tuple[str, Sequence[str]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of every step of every run, one run after the other, and why others failed.

    For CUDA graphs: a run that fails to record one must not end the others.
    """
    seconds, failed = {}, {}
    epochs = -(-rounds // STEPS_PER_EPOCH)
    with tempfile.TemporaryDirectory() as folder:
        images = training_images(effort, Path(folder))
        for name, run in runs.items():
            timer = Timer(per_epoch=False)
            told = _Told()
            logging.getLogger(step_graph.__name__).addHandler(told)
            try:
                train(effort, *run, images, epochs, timer)
                if told.lines:
                    # It has run without graphs.
                    raise RuntimeError(told.lines[0])
                seconds[name] = timer.seconds
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {first_line(error)}"
            finally:
                logging.getLogger(step_graph.__name__).removeHandler(told)
    return seconds, failed


def race_trainers(
    effort: Effort,
    runs: Mapping[str, tuple[str, Sequence[str]]],
    per_epoch: bool,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of every round, an epoch or a step, of every run: config and changes by name.

    Raises:
        Exception: what one of the runs raised.
    """
    timers = {name: Turns(per_epoch) for name in runs}
    failures: list[BaseException] = []
    epochs = rounds if per_epoch else -(-rounds // STEPS_PER_EPOCH)

    def work(timer: Turns, name: str, changes: Sequence[str], images: Path) -> None:
        try:
            train(effort, name, changes, images, epochs, timer)
        except BaseException as error:
            failures.append(error)
        finally:
            timer.leave()

    with tempfile.TemporaryDirectory() as folder:
        images = training_images(effort, Path(folder))
        for name, timer in timers.items():
            threading.Thread(target=work, args=(timer, *runs[name], images), daemon=True).start()
            # Composing and seeding use what threads share: one run after the other starts.
            timer.wait()
        while running := [timer for timer in timers.values() if timer.running]:
            for timer in running:
                timer.turn()
    # Each run leaves the variable as it found it, which is another's where they overlap.
    os.environ.pop("SOLO_EXT_RUN_DIR", None)
    if failures:
        raise failures[0]
    return {name: timer.seconds for name, timer in timers.items()}
