"""Trains a prepared run, or continues it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from solo_ext import __version__
from solo_ext.config.compose import apply_overrides, parse
from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import (
    ConfigError,
    ProcessLost,
    StoppedBySignal,
    UserError,
    disk_trouble,
)
from solo_ext.core.files import locked, write_text
from solo_ext.data.folders import ImageFiles
from solo_ext.data.loaders import ResumableLoader, fixed_loader, pretrain_loader
from solo_ext.data.reading import unwrap_dataset
from solo_ext.host.dali_loader import DALILoader
from solo_ext.host.patches import announce, default_patches, select_for_run
from solo_ext.lab.ending import log_traceback
from solo_ext.lab.evaluation.online import OnlineEvaluation
from solo_ext.lab.training.checkpoints import RunCheckpoint
from solo_ext.lab.training.compiled import compile_networks
from solo_ext.lab.training.epoch_log import EpochLog
from solo_ext.lab.training.lightning_internals import (
    StepLog,
    go_on_with_the_next_epoch,
    log_without_waiting,
)
from solo_ext.lab.training.nonfinite import NonFiniteWatch
from solo_ext.lab.training.prepare import Prepared, prepare, tell_of
from solo_ext.lab.training.progress import Bar, print_epoch
from solo_ext.lab.training.resumption import RunState, identity, resume_point, set_aside
from solo_ext.lab.training.run_dir import (
    ARGS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    LOGGERS,
    METRICS,
    RUN_DIR,
    WEIGHTS,
    Checkpoint,
    agreed_run_dir,
    checkpoints,
    environment,
    file_name,
    read_config,
    recorded_version,
    resume_hint,
    warn_of_changes,
)
from solo_ext.lab.training.step_graph import StepGraphs, records_graphs
from solo_ext.lab.training.trainer import JsonLines, RunData, make_trainer, quiet
from solo_ext.lab.training.watch import UNREADABLE, CollapseWatch, UnreadableReport
from solo_ext.pretrained.weights import Start, start_from

logger = logging.getLogger(__name__)

_DOES_NOT_FIT = ("Error(s) in loading state_dict", "loaded state dict")
# Backends have no error class for a lost process, so their messages are searched for these texts.
# Messages about a port in use, a failed rendezvous and mismatched collectives are left out on
# purpose: no process was lost.
_LOST_PROCESS_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
    "timed out waiting",
)
_LONGEST = 160


@dataclass(frozen=True)
class PretrainResult:
    """Result of a finished run.

    Attributes:
        run_dir: the run directory.
        checkpoint: the last checkpoint, ``None`` with ``checkpoint.enabled=false``.
        epochs: total number of epochs trained.
        seconds: training time of this call.
        images_per_second: training images (not crops) per second of that time.

    >>> result = PretrainResult(Path("runs/pcl"), None, 200, 3600.0, images_per_second=2778.0)
    >>> result.epochs, result.images_per_second
    (200, 2778.0)
    """

    run_dir: Path
    checkpoint: Path | None
    epochs: int
    seconds: float
    images_per_second: float


def pretrain(
    prepared: Prepared,
    *,
    run_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = True,
    force: bool = False,
    records: Mapping[str, str] | None = None,
) -> PretrainResult:
    """Trains from the start, or continues from the run's last checkpoint.

    Args:
        prepared: the checked run.
        run_dir: by default named after method, name and config. If it holds checkpoints of this
            config, the run continues from them.
        callbacks: further Lightning callbacks.
        show_progress: report progress on standard error.
        force: continue even if the checkpoint is of other settings or images.
        records: texts by name of a file that is written beside the run's own records.

    Raises:
        UserError: a checkpoint that cannot be used, a logger that is not installed, another process
            using the directory, or a directory that cannot be written.
        StoppedBySignal: a signal ended the run; during training, after a checkpoint was written.
        ProcessLost: another process of the run, or a data worker, died.
    """
    run = prepared.run
    if run_dir is None:
        run_dir = agreed_run_dir(run)
    # Make the path absolute: checkpoints are named after the folder, which may be `.`.
    run_dir = Path(os.path.abspath(run_dir))
    _refuse_among_images(run_dir, prepared)
    own_identity = identity(run, prepared.train, prepared.val)
    held = checkpoints(run_dir)
    checkpoint, damaged = resume_point(
        run_dir, run.resume_from_checkpoint, own_identity, force=force
    )
    make: Any = DALILoader if run.data.format == "dali" else pretrain_loader
    loader = make(run, prepared.train)
    # Without labels there is nothing that the classifier could be validated on.
    val = None if run.data.no_labels else prepared.val
    val_loader = None if val is None else fixed_loader(run, val)
    data = RunData(run, loader, val_loader)

    quiet()
    pl.seed_everything(run.seed, workers=True, verbose=False)
    graphs = records_graphs(run)
    defaults = default_patches(
        run.method,
        warmup_epochs=run.scheduler.warmup_epochs,
        max_steps=(run.model_extra or {}).get("max_steps"),
        graphs=graphs,
    )
    patched = select_for_run(run.patches, defaults)
    model = _method(prepared)
    start = None
    if run.backbone.weights is not None and checkpoint is None:
        # A resumed run has the weights of its checkpoint, and does not need the file any more.
        start = _start_from_weights(run, model)
        own_identity["weights"]["digest"] = start.digest if start.file else None
    if not run.performance.disable_channel_last:
        model.to(memory_format=torch.channels_last)
    compile_networks(model, run.performance.compile)
    name = file_name(run.name)
    stem = run_dir.name if run_dir.name.startswith(f"{name}-") else f"{name}-{run_dir.name}"
    lines = JsonLines(run_dir / METRICS)

    def go_on(step: int, unlogged: dict[str, Any] | None) -> None:
        lines.go_on(step, unlogged)
        set_aside(damaged)

    def begin() -> None:
        # Called after the first batch, so a finished run, which trains no batch, gets no warning.
        if checkpoint is not None:
            warn_of_changes(run_dir, patched)
        _write_records(run_dir, prepared, patched)
        for file, text in (records or {}).items():
            write_text(run_dir / file, text)
        if start is not None:
            write_text(run_dir / WEIGHTS, json.dumps(start.record(), indent=1))

    state = RunState(loader, own_identity, restored=go_on, begin=begin)
    watch = NonFiniteWatch(run_dir, loader.dataset.images, run.on_nonfinite)
    own: list[Callback] = [StepLog(), state, watch, CollapseWatch(), *callbacks]
    if graphs:
        own.append(StepGraphs(watch.spoil))
    if run.online_eval.every_n_epochs:
        own.append(OnlineEvaluation(run, prepared.train, prepared.val, run_dir / "online"))
    if run.data.unreadable == "skip":
        loaders = [loader] if val_loader is None else [loader, val_loader]
        own.append(UnreadableReport(run_dir / UNREADABLE, loaders))
    ending = contextlib.ExitStack()
    times = EpochLog(run_dir, run.optimizer.batch_size * run.world_size)
    own.append(times)
    if show_progress:
        labels = not run.data.no_labels
        if sys.stderr.isatty() and getattr(run, "enable_progress_bar", None) is not False:
            own.append(Bar(labels, times))
        else:
            times.show = functools.partial(print_epoch, run.method, labels)
    if run.checkpoint.enabled:
        saving = RunCheckpoint(run_dir, stem, run.checkpoint)
        own.append(saving)
        # Restore the handlers only after fit(): a signal in its teardown would start that again.
        ending.callback(saving.signals.leave)
        if isinstance(loader, ResumableLoader):
            loader.on_lost = saving.note_lost
    trainer = make_trainer(run, run_dir, own, lines)
    log_without_waiting(trainer, model)
    go_on_with_the_next_epoch(trainer)
    if run.debug_augmentations:
        through_dali = isinstance(loader, DALILoader)
        print(loader if through_dali else data.augment or loader.dataset.transform)
    since = time.monotonic()
    # The processes that Lightning starts for other ranks read this variable.
    os.environ[RUN_DIR] = str(run_dir)
    ending.callback(os.environ.pop, RUN_DIR, None)

    with (
        ending,
        _locked_run_dir(run_dir, trainer, held),
        _errors_explained(run_dir, held, trainer, state, checkpoint),
    ):
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    seconds, found = time.monotonic() - since, checkpoints(run_dir)
    images = state.batches * run.optimizer.batch_size * trainer.world_size
    last = found[-1] if found else None
    # Prefer the checkpoint: for a finished run, Lightning counts only the epochs that it saw whole.
    path, epochs = (last.path, last.epoch + 1) if last else (None, trainer.current_epoch)
    return PretrainResult(run_dir, path, epochs, seconds, images / seconds)


def _refuse_among_images(run_dir: Path, prepared: Prepared) -> None:
    """Refuses a run directory inside a folder of images, where its own pictures would become some.

    In a folder of class folders it would become a class.
    """
    data, place = prepared.run.data, Path(os.path.realpath(run_dir))
    for paths, images in ((data.train_path, prepared.train), (data.val_path, prepared.val)):
        if not isinstance(unwrap_dataset(images, ())[0], ImageFiles):
            continue
        for path in [paths] if isinstance(paths, str) else paths or ():
            if Path(path).is_dir() and place.is_relative_to(os.path.realpath(path)):
                raise UserError(
                    f"run directory {str(run_dir)!r}: it lies in {path!r}, the folder of the "
                    "images, and would be read with them; name one elsewhere with --run-dir"
                )


def _method(prepared: Prepared) -> Any:
    try:
        return prepared.method(prepared.cfg)
    except UserError:
        raise
    except Exception as error:
        backbone = prepared.run.backbone
        if backbone.kwargs.get("pretrained") and isinstance(error, OSError):
            raise ConfigError(
                "backbone.kwargs.pretrained",
                True,
                f"its weights cannot be fetched ({log_traceback(error)})",
                "see to the connection, or leave it out",
            ) from error
        raise UserError(
            f"method {prepared.run.method!r} cannot be built: {log_traceback(error)}"
        ) from error


def _start_from_weights(run: RunConfig, model: Any) -> Start:
    copies = [model.momentum_backbone] if hasattr(model, "momentum_backbone") else []
    # Loading a network of a library draws random numbers: the run's must not depend on it.
    with torch.random.fork_rng(devices=[]):
        start = start_from(run.backbone, model.backbone, *copies)
    rank_zero_only(logger.info)(str(start))
    return start


@contextlib.contextmanager
def _errors_explained(
    run_dir: Path,
    held: Sequence[Checkpoint],
    trainer: pl.Trainer,
    state: RunState,
    checkpoint: Path | None,
) -> Iterator[None]:
    """Turns errors that a user can fix into a ``UserError`` that says how."""
    try:
        yield
    except UserError:
        raise
    except SystemExit as left:
        # On Ctrl-C, Lightning exits without a message if RunCheckpoint does not handle signals:
        # before the first batch, after the last one, or with checkpoints turned off.
        if not isinstance(left.__context__, KeyboardInterrupt):
            raise
        raise StoppedBySignal(f"stopped by SIGINT; {resume_hint(run_dir)}", signal.SIGINT) from None
    except Exception as error:
        explained = _explained(error, run_dir, held, trainer, state, checkpoint)
        if explained is None:
            error.add_note(resume_hint(run_dir))
            raise
        raise explained from error


def _explained(
    error: Exception,
    run_dir: Path,
    held: Sequence[Checkpoint],
    trainer: pl.Trainer,
    state: RunState,
    checkpoint: Path | None,
) -> UserError | None:
    """Returns an error that says what to do, or ``None`` for an unforeseen error."""
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    lost = missing is not None and Path(os.fsdecode(missing)).is_relative_to(run_dir)
    if state.batches and (lost or not run_dir.is_dir()):
        return UserError(
            f"run directory {str(run_dir)!r} is gone, or a file in it: it was moved or removed "
            "while training; if it was moved, `solo-ext pretrain --resume` goes on with it "
            "where it is now"
        )
    again, several = resume_hint(run_dir), trainer.world_size > 1
    trouble = disk_trouble(error, again)
    if trouble is not None:
        return trouble
    first, *rest = str(error).splitlines() or [""]
    said = " ".join(str(error).split())
    # Until the state is restored, the processes may not have connected yet.
    connected = several and state.restored and isinstance(error, RuntimeError)
    if connected and any(words in said.lower() for words in _LOST_PROCESS_MESSAGES):
        # gloo's messages begin with the path of its source file in brackets.
        what = said.partition("] ")[2] if said.startswith("[") else said
        return ProcessLost(
            f"another process of this run is gone or hangs, at epoch {trainer.current_epoch}, "
            f"optimiser step {trainer.global_step} ({what[:_LONGEST]}); why is in what it printed "
            f"or in its node's log; {again}"
        )
    loading = checkpoint is not None and isinstance(error, RuntimeError | ValueError)
    if loading and first.startswith(_DOES_NOT_FIT):
        return UserError(
            f"checkpoint {str(checkpoint)!r} does not fit this method or its settings "
            f"({rest[0].strip()[:_LONGEST] if rest else first}); give one of this run"
        )
    if checkpoint is not None and not state.restored and isinstance(error, KeyError):
        # The generations of solo-learn keep the state of a schedule in different forms.
        return UserError(
            f"checkpoint {str(checkpoint)!r} has no {error}, which the installed solo-learn needs; "
            f"go on with the one that the run began with, as {ENVIRONMENT} says"
        )
    no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not (held or state.batches or several or no_memory):
        # No step was trained and no checkpoint exists, so the config itself cannot be trained.
        return UserError(f"the first step of training fails: {log_traceback(error)}")
    return None


@contextlib.contextmanager
def _locked_run_dir(
    run_dir: Path, trainer: pl.Trainer, held: Sequence[Checkpoint]
) -> Iterator[None]:
    """Keeps other runs out of the directory; the first process of the run holds the lock.

    ``held`` are the checkpoints that existed when this run chose which one to resume from.
    """
    if not trainer.is_global_zero:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(run_dir / LOCK, 0))
            if made:
                stack.callback(_remove_unused, made)
            # Try to create a file: the lock may already exist in a folder that accepts no more.
            tempfile.TemporaryFile(dir=run_dir).close()
        except OSError as error:
            raise UserError(
                f"run directory {str(run_dir)!r}: {error.strerror or type(error).__name__}; name "
                "one that can be written with --run-dir"
            ) from error
        if checkpoints(run_dir) != held:
            raise UserError(
                f"run directory {str(run_dir)!r}: another process, which has ended by now, wrote "
                "a checkpoint while this one started; start it again to go on from there"
            )
        yield


def _remove_unused(made: Sequence[Path]) -> None:
    """Removes the directory of a run that failed before its first batch, and its parents."""
    run_dir, *parents = made
    if run_dir.is_dir() and {file.name for file in run_dir.iterdir()} <= {LOCK, *LOGGERS}:
        shutil.rmtree(run_dir, ignore_errors=True)
        # Another run may have started in the same parent folder.
        with contextlib.suppress(OSError):
            for folder in parents:
                folder.rmdir()


def resume(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    force: bool = False,
) -> PretrainResult:
    """Continues the run of a directory, from its most advanced checkpoint.

    Args:
        run_dir: of the run.
        overrides: of settings that change no result, such as ``data.num_workers=4``, or of paths;
            with ``force``, of any.
        callbacks: as in :func:`pretrain`.
        force: as in :func:`pretrain`.

    Raises:
        UserError: the folder is no run directory, or holds no checkpoint; an override is of a
            setting that may change the results, without ``force``.

    >>> resume(Path("nowhere"))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    cfg = OmegaConf.create(read_config(run_dir))
    apply_overrides(cfg, parse(overrides))
    config: Any = OmegaConf.to_container(cfg)
    try:
        prepared = prepare(config)
    except ConfigError as error:
        then = recorded_version(run_dir)
        if then in (None, __version__) or any(o.split("=")[0] == error.key for o in overrides):
            raise
        raise UserError(
            f"{error}; the run was written by solo_ext {then}, and this is {__version__}: go on "
            f"with that version, or leave the key out with '~{error.key}' --force"
        ) from error
    if not checkpoints(run_dir, previous=True):
        raise UserError(
            f"run directory {str(run_dir)!r}: no checkpoint to resume from; start it again with "
            "`solo-ext pretrain`"
        )
    return pretrain(prepared, run_dir=run_dir, callbacks=callbacks, force=force)


def _write_records(run_dir: Path, prepared: Prepared, patched: list[str]) -> None:
    announce(patched)
    tell_of(prepared)
    run_dir.mkdir(parents=True, exist_ok=True)
    args = OmegaConf.to_container(prepared.cfg, resolve=True)
    write_text(run_dir / ARGS, json.dumps(args, indent=1))
    write_text(run_dir / CONFIG, yaml.safe_dump(prepared.run.model_dump(), sort_keys=False))
    write_text(run_dir / ENVIRONMENT, json.dumps(environment(patched), indent=1))
