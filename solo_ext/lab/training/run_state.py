"""What checkpoints hold besides the weights: the run's identity, and its state within training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.config.schema import RunConfig
from solo_ext.core import distributed
from solo_ext.core.distributed import gather_objects
from solo_ext.data.images import names_fingerprint
from solo_ext.data.loaders import StatefulLoader
from solo_ext.data.reading import Images
from solo_ext.lab.training.lightning_internals import epoch_means, unlogged
from solo_ext.lab.training.run_dir import settings_of_numbers

_IDENTITY = "solo_ext"
"""Key of :class:`Identity` in a checkpoint."""
_PATHS = ("data.train_path", "data.val_path", "method_kwargs.teacher.path")
"""Paths do not identify data: a copy elsewhere is the same, and a teacher has a digest."""
_SHOWN = 8
_AT_START = "on_train_epoch_start."
_AT_BATCH_END = "on_train_batch_end."


@dataclass(frozen=True)
class Identity:
    """Identifies what a run trains, and on which images.

    Attributes:
        config: the checked config, as JSON.
        images: digest of the names, order and classes of the training images; ``None`` if unknown.
        count: number of training images.
    """

    config: str
    images: str | None
    count: int

    @classmethod
    def of(cls, run: RunConfig, images: Images) -> Identity:
        text = json.dumps(run.model_dump(), sort_keys=True, default=str)
        return cls(text, names_fingerprint(images), len(images))

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> Identity | None:
        """The identity in a checkpoint; ``None`` if this package did not write the file."""
        held = checkpoint.get(_IDENTITY)
        try:
            return cls(str(held["config"]), held["images"], int(held["count"]))  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            return None

    def differences(self, other: Identity) -> list[str]:
        """Differences that change the numbers, such as ``optimizer.lr: 0.3 -> 0.1``."""
        mine, theirs = (settings_of_numbers(json.loads(one.config)) for one in (self, other))
        named = self.images is not None and other.images is not None

        def shown(flat: Mapping[str, Any], key: str) -> str:
            return json.dumps(flat[key]) if key in flat else "not there"

        found = [
            f"{key}: {shown(mine, key)} -> {shown(theirs, key)}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key) and not (named and key in _PATHS)
        ]
        if self.count != other.count:
            found.append(f"training images: {self.count:,} -> {other.count:,}")
        elif named and self.images != other.images:
            found.append("training images: as many, of other names, order or classes")
        return found


def listed(differences: list[str]) -> str:
    """The first few differences, and how many there are besides."""
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; {more} more" if more > 0 else "")


class RunState(Callback):
    """Keeps in checkpoints what Lightning leaves out, for every process.

    That is the position in the data (Lightning would repeat the order of the first epoch), the
    random generators, the sums behind the means over the epoch, the metrics that Lightning logs
    only after it has written the checkpoint, and the identity of the run.

    Args:
        loader: the training loader.
        identity: of the run.
        restored: called on the first process once a checkpoint, if there is one, has been found to
            fit; the attribute ``restored`` is true from then on.
        begin: called on the first process before the first batch.
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
        self.restored = self._begun = False
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_IDENTITY] = asdict(self.identity)

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
        # For a run that is already finished, Lightning skips `on_train_start`.
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
        # Lightning does not call `on_train_epoch_start` in a run resumed within an epoch.
        self._restore()
        if not self._begun and trainer.is_global_zero:
            self._begin()
        self._begun = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
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

    def _epoch_sums(self) -> dict[str, tuple[Any, ...]]:
        if self._trainer is None or self.loader.state_dict()["batches"] == 0:
            return {}
        sums = dict(self._sums)
        for name, metric in epoch_means(self._trainer).items():
            if name in self._logged_again:
                # Restore the name, because the epoch may be resumed once more.
                name = _AT_START + name.removeprefix(_AT_BATCH_END)
            sums[name] = (metric.value.cpu(), metric.cumulated_batch_size.cpu())
        return sums

    def _restore(self) -> None:
        """Restores as late as possible: a method's own start of training may draw numbers."""
        state, self._pending = self._pending, None
        if state is None:
            return
        own = state["processes"][distributed.rank() % len(state["processes"])]
        self._sums = dict(own["sums"])
        set_random_state(own)


def unlogged_in(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The metrics that were not yet logged when a checkpoint was written, and their step.

    ``None`` if there were none, or the checkpoint does not say.
    """
    try:
        held = checkpoint["callbacks"][RunState.__qualname__]["unlogged"]
        metrics = {str(name): float(value) for name, value in held["metrics"].items()}
        return {"step": int(held["step"]), "metrics": metrics}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def random_state() -> dict[str, Any]:
    """State of the generators of torch, of this process's device, of Python and of NumPy.

    >>> state = random_state()
    >>> first = torch.rand(3)
    >>> set_random_state(state)
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


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what :func:`random_state` returned; the device's state only if there is a device."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    words = words.numpy().astype(np.uint32)
    np.random.set_state((name, words, place, has_gauss, cached))  # noqa: NPY002
