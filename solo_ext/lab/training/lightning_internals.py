"""The only file that uses Lightning's private attributes.

Lightning has no public way to read the running means of an epoch, to get the metrics that it is
about to log, or to act after a method's own hook. If a new version of Lightning breaks resumption,
this is the file to repair.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import Callback
from torch import Tensor

_TO_TENSOR, _STEP, _END = "_LightningModule__to_tensor", "training_step", "on_train_batch_end"


def after_own_hook(pl_module: pl.LightningModule, then: Callable[[Any, Any, int], None]) -> None:
    """Calls ``then(outputs, batch, batch_idx)`` after the method's own ``on_train_batch_end``.

    Lightning calls callbacks before that hook, which updates momentum networks and queues.

    >>> module = pl.LightningModule()
    >>> after_own_hook(module, lambda outputs, batch, batch_idx: print(batch_idx))
    >>> module.on_train_batch_end(None, batch=None, batch_idx=3)
    3
    """
    own = pl_module.on_train_batch_end

    def own_then(outputs: Any, batch: Any, batch_idx: int) -> None:
        own(outputs, batch, batch_idx)
        then(outputs, batch, batch_idx)

    pl_module.on_train_batch_end = own_then  # type: ignore[method-assign]


def when_step_is_complete(
    trainer: pl.Trainer, pl_module: pl.LightningModule, then: Callable[[int], None]
) -> None:
    """Calls ``then(batch_idx)`` when everything that belongs to a batch is done.

    That is after the method's own hook, and after the validation that follows the batch, if there
    is one: a run resumed from here would not repeat that validation.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    validate = loop.val_loop.run
    validates_first = False

    def after_batch(outputs: Any, batch: Any, batch_idx: int) -> None:
        nonlocal validates_first
        validates_first = _validates_next(trainer)
        if not validates_first:
            then(batch_idx)

    # A validation hook would be too early: metrics and stage are still those of validation.
    def after_validation() -> Any:
        nonlocal validates_first
        first_loop_iter = connector._first_loop_iter
        found = validate()
        if validates_first:
            validates_first = False
            # Lightning itself sets these two after this function, but `then` needs them now.
            trainer.training, connector._first_loop_iter = True, first_loop_iter
            then(loop.batch_idx)
        return found

    after_own_hook(pl_module, after_batch)
    loop.val_loop.__dict__["run"] = after_validation


def ignore_sigterm_of_rank_0(trainer: pl.Trainer) -> None:
    """Lets :class:`~solo_ext.lab.training.checkpoints.RunCheckpoint` alone handle signals.

    Otherwise Lightning would ask the first process before every batch whether it received SIGTERM,
    and wait for the device to answer.
    """
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None


def go_on_with_the_next_epoch(trainer: pl.Trainer) -> None:
    """Lets a run with ``max_steps`` that is resumed between two epochs begin the next one.

    Lightning takes every resumed run with ``max_steps`` for one within an epoch: after the last
    batch of an epoch, it would train the first batch of the next epoch as one more of that one.
    """
    loop = trainer.fit_loop

    def goes_on_within_an_epoch() -> bool:
        return trainer.max_steps != -1 and not loop.epoch_loop.batch_progress.is_last_batch

    loop.__dict__["_iteration_based_training"] = goes_on_within_an_epoch


def log_without_waiting(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Lets steps log without waiting for other processes or for the device.

    With ``sync_dist=True`` Lightning averages the values of every step over the processes, each
    after a barrier, but reads them only every ``log_every_n_steps``. Here it averages only values
    that it reads; means over an epoch are averaged at its end, as before. Python numbers are
    created on the device, because the host would wait for a copy to end.
    """
    if trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu":
        # A single process on a CPU has nothing to wait for.
        return
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    log, to_tensor = results.log, getattr(pl_module, _TO_TENSOR)

    def averaged(value: Any, reduce_op: Any = None, group: Any = None) -> Any:
        in_a_step = connector._first_loop_iter is not None
        if in_a_step and not connector.should_update_logs:
            return value
        return trainer.strategy.reduce(value, group, reduce_op)

    def on_device(value: Any, name: str) -> Any:
        if isinstance(value, int | float):
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            value = torch.full((), value, device=pl_module.device, dtype=dtype)
        return to_tensor(value, name)

    def log_averaged(*args: Any, **kwargs: Any) -> None:
        log(*args, **{**kwargs, "sync_dist_fn": averaged})

    results.__dict__["log"] = log_averaged
    pl_module.__dict__[_TO_TENSOR] = on_device


class StepLog(Callback):
    """Adds what a training step logs to Lightning's means over the epoch all at once.

    Lightning needs seven operations for every value of every step. Here a value takes one, a copy,
    because methods change some in place afterwards; and the values of a step take three more. The
    means are the same to the last bit. That is for means of numbers in fp32 tensors that a step of
    this epoch has logged before; Lightning itself adds all others.

    A value that is logged after a step, and of which there is no mean, is given to Lightning only
    in steps that it logs.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, ...]] = {}
        self._without_mean: set[str] = set()
        self._values: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._known, self._without_mean = {}, set()
        log, connector = pl_module.log, trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results

        def log_later(name: str, value: Any, *more: Any, **given: Any) -> None:
            hook = pl_module._current_fx_name
            after_a_step, in_a_step = hook == _END, hook == _STEP
            if after_a_step and name in self._without_mean and not connector.should_update_logs:
                return
            plain = isinstance(value, Tensor) and value.numel() == 1
            plain = plain and value.dtype == torch.float32
            # In the first batch of an epoch Lightning sets the means back.
            later = in_a_step and plain and connector._first_loop_iter is False
            if later and self._known.get(name) == (more, given) and name not in self._values:
                value = value.detach() if value.requires_grad else value
                self._values[name] = (value.squeeze() if value.ndim else value).clone()
                return
            self._add(trainer)
            log(name, value, *more, **given)
            if after_a_step:
                meta = results[f"{_END}.{name}"].meta
                if not meta.on_epoch and not meta.prog_bar:
                    self._without_mean.add(name)
            if in_a_step and plain and not given.get("batch_size"):
                metric: Any = results[f"{_STEP}.{name}"]
                if metric.meta.on_epoch and metric.meta.is_mean_reduction:
                    self._known[name] = more, given

        pl_module.__dict__["log"] = log_later

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._add(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Of a step without a loss.
        self._add(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("log", None)

    def _add(self, trainer: pl.Trainer) -> None:
        """Adds the values of a step, as ``_ResultMetric.update`` does one by one."""
        if not self._values:
            return
        results: Any = trainer.fit_loop.epoch_loop._results
        metrics = [results[f"{_STEP}.{name}"] for name in self._values]
        values, self._values = list(self._values.values()), {}
        size = results._extract_batch_size(metrics[0], None, metrics[0].meta)
        # Lightning rounds the products too.
        products = torch._foreach_mul(values, size)
        torch._foreach_add_([metric.value for metric in metrics], products)
        torch._foreach_add_([metric.cumulated_batch_size for metric in metrics], size)
        for metric, value in zip(metrics, values, strict=True):
            metric._computed, metric.has_reset = None, False
            metric._update_count += 1
            if metric.meta.on_step:
                metric._forward_cache = metric.meta.sync(value)
        trainer._logger_connector._current_fx = _STEP


def _validates_next(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after this batch but would not in a run resumed from here."""
    by_clock = getattr(trainer, "_val_check_time_interval", None) is not None
    if by_clock or (trainer.should_stop and trainer.fit_loop._can_stop_early):
        # A resumed run restarts the clock, and a run that is about to stop is saved at its end.
        return False
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def epoch_means(trainer: pl.Trainer) -> dict[str, Any]:
    """Lightning's running means of the epoch by name; each holds a sum and a batch size."""
    return {
        name: metric
        for name, metric in trainer.fit_loop.epoch_loop._results.items()
        if metric.is_tensor and metric.meta.on_epoch and metric.meta.is_mean_reduction
    }


def unlogged(trainer: pl.Trainer) -> dict[str, Any] | None:
    """Metrics that Lightning logs only after the hooks that write checkpoints, with their step.

    A process killed in between has done the step or the epoch, but would never log them. The result
    is ``None`` if there are no such metrics.
    """
    if trainer.interrupted:
        # An error ended the run after its last step was logged.
        return None
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    step = loop._batches_that_stepped
    if connector._first_loop_iter is None:
        # Lightning logs the means of an epoch under the number of its last step.
        step -= 1
    elif trainer.fit_loop._should_accumulate() or not connector.should_update_logs:
        return None
    metrics = dict(convert_tensors_to_scalars(connector.metrics["log"]))
    step = int(metrics.pop("step", step))
    return {"step": step, "metrics": {"epoch": trainer.current_epoch, **metrics}}


def start_other_ranks_by(command: Callable[[Sequence[str]], list[str]]) -> None:
    """Makes Lightning start other ranks by the command ``command(["python", "script", ...])``.

    >>> from unittest import mock
    >>> from lightning.pytorch.strategies.launchers import subprocess_script as launcher
    >>> with mock.patch.dict(vars(launcher)):
    ...     start_other_ranks_by(lambda words: ["nice", *words])
    ...     launcher._basic_subprocess_cmd()[0]
    'nice'
    """
    launcher = importlib.import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    basic, with_hydra = launcher._basic_subprocess_cmd, launcher._hydra_subprocess_cmd

    def changed_hydra(local_rank: int) -> tuple[list[str], str]:
        words, folder = with_hydra(local_rank)
        return command(words), folder

    vars(launcher).update(
        _basic_subprocess_cmd=lambda: command(basic()), _hydra_subprocess_cmd=changed_hydra
    )
