"""Which run a checkpoint is of, and how another one differs from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from solo_ext.config.check import check_run
from solo_ext.core.errors import UserError
from solo_ext.data.images import names_fingerprint
from solo_ext.data.reading import Images
from solo_ext.lab.training.run_dir import changes_numbers, numbers_alike

KEY = "solo_ext"
"""Where checkpoints hold it."""
_SHOWN = 8
_PATHS = ("data.train_path", "data.val_path", "method_kwargs.teacher.path")
"""Copies elsewhere are the same; a teacher's weights have a digest in the checkpoint."""


@dataclass(frozen=True)
class Identity:
    """What a run trains, on what.

    Attributes:
        config: the checked config, as JSON.
        images: digest of the names, order and classes of the training images, ``None`` where
            nothing tells.
        count: how many there are.
    """

    config: str
    images: str | None
    count: int

    @classmethod
    def of(cls, given: Mapping[str, Any], images: Images) -> Identity:
        """That of a checked config and its training images."""
        text = json.dumps(given, sort_keys=True, default=str)
        return cls(text, names_fingerprint(images), len(images))

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> Identity | None:
        """That which a checkpoint holds; ``None`` for one that was not written here."""
        held = checkpoint.get(KEY)
        try:
            return cls(str(held["config"]), held["images"], int(held["count"]))  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            return None

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Puts it into a checkpoint."""
        checkpoint[KEY] = asdict(self)

    def differences(self, other: Identity) -> list[str]:
        """What is not the same in another run, and changes its numbers.

        Returns:
            For example ``["optimizer.lr: 0.3 -> 0.1"]``.
        """
        mine, theirs = (_flat(_completed(json.loads(one.config))) for one in (self, other))
        named = self.images is not None and other.images is not None
        found = [
            f"{key}: {_shown(mine, key)} -> {_shown(theirs, key)}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key) and not (named and key in _PATHS)
        ]
        if self.count != other.count:
            found.append(f"training images: {self.count:,} -> {other.count:,}")
        elif named and self.images != other.images:
            found.append("training images: as many, of other names, order or classes")
        return found


def listed(differences: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; {more} more" if more > 0 else "")


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """With what a run of an earlier version had no settings for, where it is valid still."""
    try:
        return check_run(config)
    except UserError:
        return config


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value):
            for number, inner in enumerate(value):
                walk(inner, f"{key}.{number}")
        elif changes_numbers(key):
            flat[key] = numbers_alike(value)

    walk(config, "")
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not there"
