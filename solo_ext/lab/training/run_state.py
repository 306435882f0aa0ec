"""The place in the data, the random generators and the identity of a run, in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import Callback

from solo_ext.core import distributed
from solo_ext.core.distributed import gather_objects
from solo_ext.data.sampler import StatefulLoader
from solo_ext.lab.training.identity import Identity
from solo_ext.lab.training.random_state import random_state, set_random_state

_AT_START = "on_train_epoch_start."
_AT_BATCH_END = "on_train_batch_end."


class RunState(Callback):
    """Keeps in checkpoints what Lightning leaves out, of every process.

    The place in the data: Lightning restores a loader's within an epoch only, and would draw the
    next epoch in the order of the first. The random generators. The sums that the epoch's means
    are taken of. What Lightning logs only after the checkpoint. And which run it is.

    Args:
        loader: the training loader.
        identity: of the run.
        restored: called on the first process when all that a checkpoint holds, if there is one,
            is found to fit.
        begin: called on the first process before the first batch, when nothing that depends on the
            config alone can fail any more.

    Attributes:
        restored: whether all that a checkpoint holds is.
        begun: whether a batch has come.
    """

    def __init__(
        self,
        loader: StatefulLoader,
        identity: Identity,
        *,
        restored: Callable[[], None],
        begin: Callable[[], None],
    ) -> None:
        self.loader, self.identity = loader, identity
        self._on_restored, self._begin = restored, begin
        self._pending: dict[str, Any] | None = None
        self._sums: dict[str, tuple[Any, ...]] = {}
        self._logged_again: set[str] = set()
        self.restored = self.begun = False
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.identity.write(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        own = random_state() | {"sums": self._epoch_sums()}
        return {
            "data": self.loader.state_dict(),
            "processes": gather_objects(own),
            "unlogged": None if self._trainer is None else unlogged(self._trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict["data"])
        self._pending = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._go_on(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A finished run starts no training.
        self._go_on(trainer)

    def _go_on(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and not self.restored:
            self._on_restored()
        self.restored = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A run resumed within an epoch starts no epoch.
        self._restore()
        if not self.begun and trainer.is_global_zero:
            self._begin()
        self.begun = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if not self._sums:
            return
        for name, metric in self._results().items():
            if name in self._sums:
                value, size = self._sums.pop(name)
                metric.value = value.to(metric.value.device) + metric.value
                metric.cumulated_batch_size = size.to(metric.value.device) + (
                    metric.cumulated_batch_size
                )
        for name in [name for name in self._sums if name.startswith(_AT_START)]:
            # A run resumed within an epoch does not log again what is known at its start.
            value, size = self._sums.pop(name)
            shown = name.removeprefix(_AT_START)
            pl_module.log(shown, value / size, on_step=False, on_epoch=True, batch_size=int(size))
            self._logged_again.add(f"{_AT_BATCH_END}{shown}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = {}
        self._logged_again = set()

    def _results(self) -> dict[str, Any]:
        """Lightning's means over the epoch."""
        assert self._trainer is not None
        held = self._trainer.fit_loop.epoch_loop._results
        return {
            name: metric
            for name, metric in held.items()
            if metric.is_tensor and metric.meta.on_epoch and metric.meta.is_mean_reduction
        }

    def _epoch_sums(self) -> dict[str, tuple[Any, ...]]:
        if self._trainer is None or self.loader.state_dict()["batches"] == 0:
            return {}
        sums = dict(self._sums)
        for name, metric in self._results().items():
            if name in self._logged_again:
                # The epoch may be resumed once more.
                name = _AT_START + name.removeprefix(_AT_BATCH_END)
            sums[name] = (metric.value.cpu(), metric.cumulated_batch_size.cpu())
        return sums

    def _restore(self) -> None:
        """Late, because a method's own start of training may draw numbers."""
        state, self._pending = self._pending, None
        if state is None:
            return
        own = state["processes"][distributed.rank() % len(state["processes"])]
        self._sums = dict(own["sums"])
        set_random_state(own)


def unlogged_in(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """What :func:`unlogged` was when a checkpoint was written; ``None`` where nothing tells."""
    try:
        held = checkpoint["callbacks"][RunState.__qualname__]["unlogged"]
        metrics = {str(name): float(value) for name, value in held["metrics"].items()}
        return {"step": int(held["step"]), "metrics": metrics}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def unlogged(trainer: pl.Trainer) -> dict[str, Any] | None:
    """The metrics that Lightning will log after the hooks which write checkpoints, if any.

    A process that is killed in between has done the step or the epoch, and would never log it.
    """
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    step = loop._batches_that_stepped
    if connector._first_loop_iter is None:
        # At the end of an epoch: its means, under its last step.
        step -= 1
    elif trainer.fit_loop._should_accumulate() or not connector.should_update_logs:
        return None
    metrics = dict(convert_tensors_to_scalars(connector.metrics["log"]))
    step = int(metrics.pop("step", step))
    return {"step": step, "metrics": {"epoch": trainer.current_epoch, **metrics}}
