"""The state of a run within training, which checkpoints hold besides the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.core import distributed
from solo_ext.core.distributed import gather_objects
from solo_ext.data.loaders import StatefulLoader
from solo_ext.kernels import dispatch
from solo_ext.lab.training.lightning_internals import epoch_means, unlogged

IN_CHECKPOINT = "solo_ext"
"""Key of the state in a checkpoint."""
_AT_START = "on_train_epoch_start."
_AT_BATCH_END = "on_train_batch_end."


class RunState(Callback):
    """Keeps in checkpoints what Lightning leaves out, for every process.

    That is the position in the data (Lightning would repeat the order of the first epoch), the
    random generators, which kernels were found to be the fastest, the sums behind the means over
    the epoch, the metrics that Lightning logs only after it has written the checkpoint, and the
    identity of the run.

    Args:
        loader: the training loader.
        identity: of the run, for :mod:`solo_ext.lab.training.resume_point`.
        restored: called on the first process once a checkpoint, if there is one, has been found to
            fit, with the optimiser steps done and the metrics that were not yet logged; the
            attribute ``restored`` is true from then on.
        begin: called on the first process after the first batch.

    Attributes:
        batches: how many this process has trained on.
    """

    def __init__(
        self,
        loader: StatefulLoader,
        identity: dict[str, Any],
        *,
        restored: Callable[[int, dict[str, Any] | None], None],
        begin: Callable[[], None],
    ) -> None:
        self.loader, self.identity = loader, identity
        self._on_restored, self._begin = restored, begin
        self._pending: list[dict[str, Any]] | None = None
        self._sums: dict[str, tuple[Any, ...]] = {}
        self._logged_again: set[str] = set()
        self._unlogged: dict[str, Any] | None = None
        self.restored = False
        self.batches = 0

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = _random_state() | {"sums": self._epoch_sums(trainer), "kernels": dispatch.choices()}
        checkpoint[IN_CHECKPOINT] = {
            "identity": self.identity,
            "data": self.loader.state_dict(),
            "processes": gather_objects(own),
            "unlogged": unlogged(trainer),
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint.get(IN_CHECKPOINT)
        if state is not None:
            self.loader.load_state_dict(state["data"])
            self._pending, self._unlogged = state["processes"], state["unlogged"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._go_on(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # For a run that is already finished, Lightning skips `on_train_start`.
        self._go_on(trainer)

    def _go_on(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and not self.restored:
            self._on_restored(trainer.global_step, self._unlogged)
        self.restored = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.batches += 1
        if self.batches == 1 and trainer.is_global_zero:
            self._begin()
        if not self._sums:
            return
        for name, metric in epoch_means(trainer).items():
            if name in self._sums:
                value, size = self._sums.pop(name)
                metric.value = value.to(metric.value.device) + metric.value
                metric.cumulated_batch_size = size.to(metric.value.device) + (
                    metric.cumulated_batch_size
                )
        for name in [name for name in self._sums if name.startswith(_AT_START)]:
            # A run resumed within an epoch does not log again what was logged at its start.
            value, size = self._sums.pop(name)
            shown = name.removeprefix(_AT_START)
            pl_module.log(shown, value / size, on_step=False, on_epoch=True, batch_size=int(size))
            self._logged_again.add(f"{_AT_BATCH_END}{shown}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = {}
        self._logged_again = set()

    def _epoch_sums(self, trainer: pl.Trainer) -> dict[str, tuple[Any, ...]]:
        if self.loader.state_dict()["batches"] == 0:
            return {}
        sums = dict(self._sums)
        for name, metric in epoch_means(trainer).items():
            if name in self._logged_again:
                # Restore the name, because the epoch may be resumed once more.
                name = _AT_START + name.removeprefix(_AT_BATCH_END)
            sums[name] = (metric.value.cpu(), metric.cumulated_batch_size.cpu())
        return sums

    def _restore(self, *_: Any, **__: Any) -> None:
        """Restores as late as possible: a method's own start of training may draw numbers."""
        processes, self._pending = self._pending, None
        if processes is None:
            return
        own = processes[distributed.rank() % len(processes)]
        self._sums = dict(own["sums"])
        dispatch.restore_choices(own["kernels"])
        _set_random_state(own)

    # In a run resumed within an epoch Lightning calls the second alone.
    on_train_epoch_start = on_train_batch_start = _restore


def _random_state() -> dict[str, Any]:
    """State of the generators of torch, of this process's device, of Python and of NumPy.

    >>> state = _random_state()
    >>> first = torch.rand(3)
    >>> _set_random_state(state)
    >>> bool((torch.rand(3) == first).all())
    True
    """
    version, keys, gauss = random.getstate()
    name, words, place, has_gauss, cached = cast(
        Any,
        np.random.get_state(legacy=True),  # noqa: NPY002 (others may draw from it)
    )
    words = torch.from_numpy(words.astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(keys), gauss),
        "numpy": (str(name), words, place, has_gauss, cached),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what :func:`_random_state` returned, that of a GPU only if there is one."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    words = words.numpy().astype(np.uint32)
    np.random.set_state((name, words, place, has_gauss, cached))  # noqa: NPY002
