"""Resumption: what a checkpoint holds besides weights, and which one a run continues from."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.config.check import result_settings
from solo_ext.config.schema import RunConfig
from solo_ext.core import distributed
from solo_ext.core.distributed import gather_objects
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import check_archive
from solo_ext.data.images import images_fingerprint, sizes_fingerprint
from solo_ext.data.loaders import StatefulLoader
from solo_ext.data.reading import Images
from solo_ext.kernels import dispatch
from solo_ext.lab.training.lightning_internals import epoch_means, unlogged
from solo_ext.lab.training.run_dir import ENVIRONMENT, PREVIOUS, checkpoints
from solo_ext.pretrained.weights import weights_digest

logger = logging.getLogger(__name__)
_STATE = "solo_ext"
"""Key of this package's state in a checkpoint."""
_AT_START = "on_train_epoch_start."
_AT_BATCH_END = "on_train_batch_end."
_NOT_NOW = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE)
PATHS = ("data.train_path", "data.val_path", "method_kwargs.teacher.path")
"""Paths do not identify data: a copy elsewhere is the same data, and a teacher has a digest."""
_SHOWN = 8


class RunState(Callback):
    """Adds to checkpoints what Lightning leaves out, for every process.

    That is the position in the data (Lightning would repeat the order of the first epoch), the
    state of the random generators, the kernels that were found to be the fastest, the sums behind
    the means over the epoch, the metrics that Lightning logs only after it has written the
    checkpoint, and the :func:`identity` of the run.

    Args:
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
        checkpoint[_STATE] = {
            "identity": self.identity,
            "data": self.loader.state_dict(),
            "processes": gather_objects(own),
            "unlogged": unlogged(trainer),
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint.get(_STATE)
        if state is not None:
            weights, held = self.identity["weights"], state["identity"].get("weights")
            if weights and held and not weights["digest"]:
                # The file is gone: later checkpoints have its digest from this one.
                self.identity = {**self.identity, "weights": held}
            self.loader.load_state_dict(state["data"])
            self._pending, self._unlogged = state["processes"], state["unlogged"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and not self.restored:
            self._on_restored(trainer.global_step, self._unlogged)
        self.restored = True

    # For a run that is already finished, Lightning skips `on_train_start`.
    on_fit_end = on_train_start

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
            # A resumed run does not repeat what was logged at the start of the epoch: log it here.
            value, size = self._sums.pop(name)
            shown = name.removeprefix(_AT_START)
            pl_module.log(shown, value / size, on_step=False, on_epoch=True, batch_size=int(size))
            self._logged_again.add(f"{_AT_BATCH_END}{shown}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = {}
        self._logged_again = set()

    def _epoch_sums(self, trainer: pl.Trainer) -> dict[str, tuple[Any, ...]]:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            # The epoch is over: the next one has sums of its own.
            return {}
        sums = dict(self._sums)
        for name, metric in epoch_means(trainer).items():
            if name in self._logged_again:
                # Restore the name, because the epoch may be resumed once more.
                name = _AT_START + name.removeprefix(_AT_BATCH_END)
            sums[name] = (metric.value.cpu(), metric.cumulated_batch_size.cpu())
        return sums

    def _restore(self, *_: Any, **__: Any) -> None:
        """Restores the state as late as possible: a method's own start hooks may draw numbers."""
        processes, self._pending = self._pending, None
        if processes is None:
            return
        own = processes[distributed.rank() % len(processes)]
        self._sums = dict(own["sums"])
        dispatch.restore_choices(own["kernels"])
        _set_random_state(own)

    # In a run resumed within an epoch, Lightning calls only `on_train_batch_start`.
    on_train_epoch_start = on_train_batch_start = _restore


def _random_state() -> dict[str, Any]:
    """State of this process's random generators of torch, its CUDA device, Python and NumPy."""
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
    """Restores what :func:`_random_state` returned; the CUDA part only if there is a GPU."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    words = words.numpy().astype(np.uint32)
    np.random.set_state((name, words, place, has_gauss, cached))  # noqa: NPY002


def identity(run: RunConfig, images: Images, val: Images | None = None) -> dict[str, Any]:
    """What identifies a run: its config, its images, and the weights that its backbone starts from.

    Of the images that is their number, names, order, classes and sizes; of the weights, what
    ``backbone.weights`` names and the file's digest, which is null if there is no file (any more).

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> identity(check_run(compose("digits/simclr")), [("an image", 0)])["count"]
    1
    """
    config = json.dumps(run.model_dump(), sort_keys=True, default=str)
    word = run.backbone.weights
    return {
        "config": config,
        **_of_images(images),
        "count": len(images),
        "val": None if val is None else _of_images(val),
        "weights": None if word is None else {"source": word, "digest": weights_digest(word)},
    }


def _of_images(images: Images) -> dict[str, str | None]:
    found = images_fingerprint(images, by_name=True)
    return {"images": found, "sizes": sizes_fingerprint(images)}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two identities that can change the results."""
    mine, theirs = (result_settings(json.loads(one["config"])) for one in (then, now))
    # Images of some formats have no names.
    named = then["images"] is not None and now["images"] is not None

    def shown(flat: Mapping[str, Any], key: str) -> str:
        if key not in flat:
            return "not there"
        value = flat[key]
        whole = isinstance(value, float) and value.is_integer()
        return json.dumps(int(value) if whole else value)

    found = [
        f"{key}: {shown(mine, key)} -> {shown(theirs, key)}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
        and not (named and key in PATHS)
        and key != "backbone.weights"
    ]
    found += _other_weights(then.get("weights"), now.get("weights"))
    if then["count"] != now["count"]:
        found.append(f"training images: {then['count']:,} -> {now['count']:,}")
    elif named and then["images"] != now["images"]:
        found.append("training images: as many, of other names, order or classes")
    # Checkpoints of earlier versions have no sizes.
    elif then.get("sizes") not in (None, now["sizes"]):
        found.append("training images: others under the same names, as the sizes of files tell")
    return found


def _other_weights(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """Whether a backbone started from other weights, by digest, else by name.

    A run goes on without the file that it started from, which its checkpoints do not need.
    """
    if then is None or now is None:
        held = [None if one is None else one["source"] for one in (then, now)]
        same = then is now
    elif then["digest"] and now["digest"]:
        held = [f"{one['source']} ({one['digest']})" for one in (then, now)]
        same = then["digest"] == now["digest"]
    else:
        held = [then["source"], now["source"]]
        same = held[0] == held[1]
    return [] if same else [f"backbone.weights: {' -> '.join(map(json.dumps, held))}"]


def set_aside(damaged: Mapping[Path, str]) -> None:
    """Renames damaged checkpoints, with a warning, so that they no longer count as checkpoints.

    The caller must hold the lock of the directory.

    Args:
        damaged: the files, and why each cannot be read.

    Raises:
        UserError: a file cannot be renamed.

    >>> set_aside({})
    """
    for path, why in damaged.items():
        kept = f"{path.name.removesuffix(PREVIOUS)}.unreadable"
        logger.warning(f"{why}; it is kept as {kept}, and the one before it is used")
        try:
            # Another process of this run may have renamed it already.
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, path.with_name(kept))
        except OSError as error:
            raise UserError(
                f"checkpoint {str(path)!r} cannot be renamed ({error.strerror}); remove it"
            ) from error


def resume_point(
    run_dir: Path, named: str | None, identity: Mapping[str, Any], *, force: bool = False
) -> tuple[Path | None, dict[Path, str]]:
    """Finds the most advanced intact checkpoint of a run directory; changes no file.

    Args:
        run_dir: directory of the run; it need not exist.
        named: ``resume_from_checkpoint``, a file to start from if the directory has none.
        identity: the :func:`identity` of the run that should continue.
        force: continue even if the checkpoint is of another run.

    Returns:
        The checkpoint, or ``None`` for a run that starts from scratch; and more advanced
        checkpoints that cannot be read, each with the reason.

    Raises:
        UserError: the checkpoint is of another run, no checkpoint can be read, or the system
            refuses to read one now.

    >>> import tempfile
    >>> resume_point(Path(tempfile.mkdtemp()), None, {})  # from scratch
    (None, {})
    """
    damaged: dict[Path, str] = {}
    for held in reversed(checkpoints(run_dir, previous=True)):
        try:
            state = read_state(held.path)
        except UserError as error:
            # The system refuses to read the file now, which does not mean that it is damaged.
            why = error.__cause__
            if isinstance(why, MemoryError) or getattr(why, "errno", None) in _NOT_NOW:
                raise
            damaged[held.path] = str(error)
            continue
        _check_same_run(held.path, state, identity, force)
        return held.path, damaged
    if damaged:
        raise UserError(
            f"{next(iter(damaged.values()))}; run directory {str(run_dir)!r} has no other one that "
            "can; start again in another directory"
        )
    if named is None:
        return None, {}
    if not os.path.isfile(named):
        raise ConfigError(
            "resume_from_checkpoint", named, "no such file", "give a .ckpt file of this run"
        )
    _check_same_run(Path(named), read_state(Path(named)), identity, force)
    return Path(named), {}


def read_state(path: Path) -> dict[str, Any]:
    """The content of a training checkpoint, read without running code.

    Raises:
        UserError: the file is incomplete, damaged, or no training checkpoint.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "pcl-ep=0.ckpt"
    >>> torch.save({"epoch": 0, "global_step": 21, "state_dict": {}}, file)
    >>> read_state(file)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: checkpoint '...' cannot be read (it holds no 'loops')
    """
    check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = [k for k in ("epoch", "global_step", "state_dict", "loops") if k not in state]
        if missing:
            raise ValueError(f"it holds no {missing[0]!r}")
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)
        reason = (said.splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {str(path)!r} cannot be read ({reason})") from error
    return state  # type: ignore[no-any-return]


def _check_same_run(
    path: Path, state: Mapping[str, Any], identity: Mapping[str, Any], force: bool
) -> None:
    # A file that this package did not write has no identity.
    held = state.get(_STATE)
    if held is not None and (missing := _missing(held)):
        raise UserError(
            f"checkpoint {str(path)!r} is of another version of solo_ext (it has no {missing!r}): "
            f"go on with that one, which {ENVIRONMENT} names, or begin a new run with its weights, "
            f"backbone.weights={path.parent}"
        )
    found = [] if held is None else _differences(held["identity"], identity)
    if found and not force:
        if all(difference.startswith("max_epochs: ") for difference in found):
            raise UserError(
                f"checkpoint {str(path)!r} is of a run of other length, {_listed(found)}; its "
                "learning rate has been falling towards its own last epoch, and with --force it "
                "rises again; a new run with backbone.weights=RUN_DIR has a schedule of its own"
            )
        raise UserError(
            f"checkpoint {str(path)!r} is of another run: {_listed(found)}; name another "
            "--run-dir, `solo-ext pretrain --resume` for the run as it was, or --force to go on "
            "with these settings"
        )
    if any(d.startswith("optimizer.name:") for d in found):
        raise UserError(
            f"checkpoint {str(path)!r} holds another optimiser's state: {_listed(found)}; "
            "start a new run"
        )
    if found:
        logger.warning(f"goes on from another run's checkpoint: {_listed(found)}")
    # They change no weights, and checkpoints of earlier versions do not tell of them.
    if held is not None and held["identity"].get("val", identity["val"]) != identity["val"]:
        logger.warning("other validation images than before: their numbers do not compare")


def _missing(held: Mapping[str, Any]) -> str | None:
    """The first part that :class:`RunState` needs of its state and a checkpoint lacks."""
    for key in ("identity", "data", "processes", "unlogged"):
        if key not in held:
            return key
    needed = {
        "identity": (held["identity"], ("config", "images", "count")),
        "data": (held["data"], ("epoch", "batches")),
        "processes": (held["processes"][0], (*_random_state(), "sums", "kernels")),
    }
    lacks = (f"{n}.{key}" for n, (part, keys) in needed.items() for key in keys if key not in part)
    return next(lacks, None)


def _listed(differences: list[str]) -> str:
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; {more} more" if more > 0 else "")
