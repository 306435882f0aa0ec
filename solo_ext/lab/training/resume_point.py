"""Chooses the checkpoint that a run continues from: an intact one, and of the same run."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.images import images_fingerprint
from solo_ext.data.reading import Images
from solo_ext.lab.training.run_dir import PREVIOUS, checkpoints, settings_of_numbers
from solo_ext.lab.training.run_state import IN_CHECKPOINT
from solo_ext.pretrained.files import check_archive

logger = logging.getLogger(__name__)
UNREADABLE = ".unreadable"
_NOT_NOW = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE)
_PATHS = ("data.train_path", "data.val_path", "method_kwargs.teacher.path")
"""Paths do not identify data: a copy elsewhere is the same, and a teacher has a digest."""
_SHOWN = 8


def identity(run: RunConfig, images: Images) -> dict[str, Any]:
    """What a run trains, and on which images: config, their number, names, order and classes.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> identity(check_run(compose("digits/simclr")), [("an image", 0)])["count"]
    1
    """
    config = json.dumps(run.model_dump(), sort_keys=True, default=str)
    return {
        "config": config,
        "images": images_fingerprint(images, by_name=True),
        "count": len(images),
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of two identities that change the numbers.

    >>> mine = {"config": '{"optimizer": {"lr": 0.3}}', "images": None, "count": 1400}
    >>> differences(mine, mine | {"config": '{"optimizer": {"lr": 0.1}}'})
    ['optimizer.lr: 0.3 -> 0.1']
    """
    mine, theirs = (settings_of_numbers(json.loads(one["config"])) for one in (then, now))
    # Images of some formats have no names.
    named = then["images"] is not None and now["images"] is not None

    def shown(flat: Mapping[str, Any], key: str) -> str:
        return json.dumps(flat[key]) if key in flat else "not there"

    found = [
        f"{key}: {shown(mine, key)} -> {shown(theirs, key)}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key) and not (named and key in _PATHS)
    ]
    if then["count"] != now["count"]:
        found.append(f"training images: {then['count']:,} -> {now['count']:,}")
    elif named and then["images"] != now["images"]:
        found.append("training images: as many, of other names, order or classes")
    return found


def set_aside(damaged: Mapping[Path, str]) -> None:
    """Renames damaged checkpoints, with a warning: with their names they would count as ours.

    The caller must hold the lock of the directory.

    Args:
        damaged: files, and why each cannot be read.

    Raises:
        UserError: a file cannot be renamed.

    >>> set_aside({})
    """
    for path, why in damaged.items():
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
    run_dir: Path, named: str | None, identity: Mapping[str, Any], *, force: bool = False
) -> tuple[Path | None, dict[Path, str]]:
    """The most advanced checkpoint of a run directory that is intact. No file is changed.

    Args:
        run_dir: of the run; it need not exist.
        named: ``resume_from_checkpoint``, a file to start from if the directory has none.
        identity: of the run that should continue.
        force: continue although the checkpoint is of another run.

    Returns:
        The checkpoint, or ``None`` for a run that starts from scratch; and more advanced ones that
        cannot be read, each with the reason.

    Raises:
        UserError: the checkpoint is of another run (with the differences), none can be read, or the
            system does not allow reading it now.

    >>> import tempfile
    >>> resume_point(Path(tempfile.mkdtemp()), None, {})  # from scratch
    (None, {})
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
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)
        reason = (said.splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {str(path)!r} cannot be read ({reason})") from error
    return state  # type: ignore[no-any-return]


def _check_same_run(
    path: Path, state: Mapping[str, Any], identity: Mapping[str, Any], force: bool
) -> None:
    # A file that this package did not write has no identity.
    held = state.get(IN_CHECKPOINT)
    found = [] if held is None else differences(held["identity"], identity)
    if found and not force:
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


def _listed(differences: list[str]) -> str:
    """The first few differences, and how many there are besides."""
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; {more} more" if more > 0 else "")


def _is_of_the_system(error: BaseException | None) -> bool:
    """Whether the system refused to read the file now, which does not mean the file is bad."""
    if isinstance(error, OSError):
        return error.errno in _NOT_NOW
    return isinstance(error, MemoryError)
