"""What a training that is stopped leaves behind, for the same command to go on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from solo_ext.core.files import atomic_write
from solo_ext.data.images import images_fingerprint
from solo_ext.lab.evaluation.subject import EvalContext

if TYPE_CHECKING:
    from solo_ext.lab.evaluation.protocols import Protocol


class EvalCheckpoint:
    """A file in the folder of the records, written after every epoch and removed at the end.

    Its name is a digest of everything that the numbers depend on: another model, setting or data
    set starts anew.

    Args:
        subject: model and images.
        settings: of the protocol.
    """

    def __init__(self, subject: EvalContext, settings: Protocol) -> None:
        first = subject.cfg["augmentations"][0]
        key = {
            "model": subject.model.digest,
            "backbone": subject.cfg["backbone"],
            "protocol": type(settings).__name__,
            "version": settings.version,
            "settings": settings.model_dump(exclude={"save"}),
            "images": [images_fingerprint(i) for i in (subject.train, subject.test)],
            "paths": [str(subject.cfg["data"][f"{s}_path"]) for s in ("train", "val")],
            "view": [first["crop_size"], first.get("mean"), first.get("std")],
        }
        text = json.dumps(key, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file: Path = subject.out / f".unfinished-{digest}.pt"

    def load(self) -> dict[str, Any] | None:
        """What :meth:`save` was given last, on the CPU; ``None`` where there is none."""
        if not self.file.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception:
            # A damaged file, in whichever of torch's ways: the training starts anew.
            return None
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Writes the whole file or none of it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.file, lambda path: torch.save(state, path))

    def remove(self) -> None:
        """Removes the file."""
        self.file.unlink(missing_ok=True)
