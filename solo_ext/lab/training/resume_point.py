"""Chooses the checkpoint that a run continues from."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.training.run_dir import PREVIOUS, checkpoints
from solo_ext.lab.training.run_state import Identity, listed, unlogged_in
from solo_ext.pretrained.files import check_archive

logger = logging.getLogger(__name__)
UNREADABLE, STRANGE = ".unreadable", ".of-another-run"
_NOT_NOW = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to continue from.

    Attributes:
        path: the file.
        step: optimiser steps done at that point.
        unlogged: metrics that the log may lack.
        unusable: other checkpoints that are damaged or of another run: file, ending, why.
    """

    path: Path
    step: int
    unlogged: dict[str, Any] | None = None
    unusable: tuple[tuple[Path, str, str], ...] = ()

    def set_unusable_aside(self) -> None:
        """Renames the unusable files, with a warning: with their names they would count as ours.

        The caller must hold the lock of the directory.

        Raises:
            UserError: a file cannot be renamed.
        """
        for path, ending, why in self.unusable:
            kept = path.name.removesuffix(PREVIOUS) + ending
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
    """The most advanced checkpoint of a run directory that is intact and of this run.

    Damaged checkpoints, and those of another run in between, are skipped. No file is changed.

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
    """
    damaged: dict[Path, str] = {}
    strange: list[tuple[Path, dict[str, Any]]] = []
    for held in reversed(checkpoints(run_dir, previous=True)):
        try:
            state = read_state(held.path)
        except UserError as error:
            if _is_of_the_system(error.__cause__):
                raise
            damaged[held.path] = str(error)
            continue
        found = Identity.read(state)
        if not force and (found is None or found.differences(identity)):
            strange.append((held.path, state))
            continue
        unusable = [(path, UNREADABLE, why) for path, why in damaged.items()]
        unusable += [(p, STRANGE, f"checkpoint {str(p)!r} is of another run") for p, _ in strange]
        # This also holds for a run that started from another run's checkpoint.
        point = _of_this_run(held.path, state, identity, force)
        return replace(point, unusable=tuple(unusable))
    if strange:
        return _of_this_run(*strange[0], identity, force)
    if damaged:
        raise UserError(
            f"{next(iter(damaged.values()))}; run directory {str(run_dir)!r} has no other one that "
            "can; start again in another directory"
        )
    if named is None:
        return None
    if not Path(named).is_file():
        raise ConfigError(
            "resume_from_checkpoint", named, "no such file", "give a .ckpt file of this run"
        )
    return _of_this_run(Path(named), read_state(Path(named)), identity, force)


def read_state(path: Path) -> dict[str, Any]:
    """The content of a training checkpoint, read without running code.

    Raises:
        UserError: the file is incomplete, damaged, or no such checkpoint.
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
            f"checkpoint {str(path)!r} is of another run: {listed(differences)}; name another "
            "--run-dir, `solo-ext pretrain --resume` for the run as it was, or --force to go on "
            "with these settings"
        )
    if any(d.startswith("optimizer.name:") for d in differences):
        raise UserError(
            f"checkpoint {str(path)!r} holds another optimiser's state: {listed(differences)}; "
            "start a new run"
        )
    if differences:
        logger.warning(f"goes on from another run's checkpoint: {listed(differences)}")
    return ResumePoint(path, int(state["global_step"]), unlogged_in(state))


def _is_of_the_system(error: BaseException | None) -> bool:
    """Whether the system refused to read the file now, which does not mean the file is bad."""
    if isinstance(error, OSError):
        return error.errno in _NOT_NOW
    return isinstance(error, MemoryError)
