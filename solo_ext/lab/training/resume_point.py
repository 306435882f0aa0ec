"""Chooses the checkpoint that a run continues from: an intact one, and of the same run."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.images import names_fingerprint
from solo_ext.data.reading import Images
from solo_ext.lab.training.run_dir import PREVIOUS, checkpoints, settings_of_numbers
from solo_ext.lab.training.run_state import unlogged_in
from solo_ext.pretrained.files import check_archive

logger = logging.getLogger(__name__)
UNREADABLE = ".unreadable"
_NOT_NOW = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE)
_IDENTITY = "solo_ext"
"""Key of :class:`Identity` in a checkpoint."""
_PATHS = ("data.train_path", "data.val_path", "method_kwargs.teacher.path")
"""Paths do not identify data: a copy elsewhere is the same, and a teacher has a digest."""
_SHOWN = 8


@dataclass(frozen=True)
class Identity:
    """Identifies what a run trains, and on which images.

    Attributes:
        config: the checked config, as JSON.
        images: digest of the names, order and classes of the training images; ``None`` if unknown.
        count: number of training images.

    >>> mine = Identity('{"optimizer": {"lr": 0.3}}', None, 1400)
    >>> mine.differences(Identity('{"optimizer": {"lr": 0.1}}', None, 1400))
    ['optimizer.lr: 0.3 -> 0.1']
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

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Writes it into a checkpoint."""
        checkpoint[_IDENTITY] = asdict(self)

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


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to continue from.

    Attributes:
        path: the file.
        step: optimiser steps done at that point.
        unlogged: metrics that the log may lack.
        damaged: more advanced checkpoints that cannot be read, and why.

    >>> ResumePoint(Path("pcl-ep=3.ckpt"), step=84).damaged
    {}
    """

    path: Path
    step: int
    unlogged: dict[str, Any] | None = None
    damaged: Mapping[Path, str] = field(default_factory=dict)

    def set_damaged_aside(self) -> None:
        """Renames the damaged files, with a warning: with their names they would count as ours.

        The caller must hold the lock of the directory.

        Raises:
            UserError: a file cannot be renamed.
        """
        for path, why in self.damaged.items():
            kept = path.name.removesuffix(PREVIOUS) + UNREADABLE
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
    run_dir: Path, named: str | None, identity: Identity, *, force: bool = False
) -> ResumePoint | None:
    """The most advanced checkpoint of a run directory that is intact. No file is changed.

    Args:
        run_dir: of the run; it need not exist.
        named: ``resume_from_checkpoint``, a file to start from if the directory has none.
        identity: of the run that should continue.
        force: continue although the checkpoint is of another run.

    Returns:
        The checkpoint; ``None`` for a run that starts from scratch.

    Raises:
        UserError: the checkpoint is of another run (with the differences), none can be read, or the
            system does not allow reading it now.

    >>> import tempfile
    >>> identity = Identity("{}", None, 1400)
    >>> resume_point(Path(tempfile.mkdtemp()), None, identity)  # from scratch
    """
    damaged: dict[Path, str] = {}
    for held in reversed(checkpoints(run_dir, previous=True)):
        try:
            state = read_state(held.path)
        except UserError as error:
            if _is_of_the_system(error.__cause__):
                raise
            damaged[held.path] = str(error)
            continue
        return replace(_of_this_run(held.path, state, identity, force), damaged=damaged)
    if damaged:
        raise UserError(
            f"{next(iter(damaged.values()))}; run directory {str(run_dir)!r} has no other one that "
            "can; start again in another directory"
        )
    if named is None:
        return None
    if not os.path.isfile(named):
        raise ConfigError(
            "resume_from_checkpoint", named, "no such file", "give a .ckpt file of this run"
        )
    return _of_this_run(Path(named), read_state(Path(named)), identity, force)


def read_state(path: Path) -> dict[str, Any]:
    """The content of a training checkpoint, read without running code.

    Raises:
        UserError: the file is incomplete, damaged, or no such checkpoint.

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
        int(state["global_step"])
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)
        reason = (said.splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {str(path)!r} cannot be read ({reason})") from error
    return state  # type: ignore[no-any-return]


def _of_this_run(path: Path, state: dict[str, Any], identity: Identity, force: bool) -> ResumePoint:
    held = Identity.read(state)
    differences = [] if held is None else held.differences(identity)
    if differences and not force:
        raise UserError(
            f"checkpoint {str(path)!r} is of another run: {_listed(differences)}; name another "
            "--run-dir, `solo-ext pretrain --resume` for the run as it was, or --force to go on "
            "with these settings"
        )
    if any(d.startswith("optimizer.name:") for d in differences):
        raise UserError(
            f"checkpoint {str(path)!r} holds another optimiser's state: {_listed(differences)}; "
            "start a new run"
        )
    if differences:
        logger.warning(f"goes on from another run's checkpoint: {_listed(differences)}")
    return ResumePoint(path, int(state["global_step"]), unlogged_in(state))


def _listed(differences: list[str]) -> str:
    """The first few differences, and how many there are besides."""
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; {more} more" if more > 0 else "")


def _is_of_the_system(error: BaseException | None) -> bool:
    """Whether the system refused to read the file now, which does not mean the file is bad."""
    if isinstance(error, OSError):
        return error.errno in _NOT_NOW
    return isinstance(error, MemoryError)
