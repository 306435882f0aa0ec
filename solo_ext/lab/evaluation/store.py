"""Features on disk: extracted once, then read by every protocol and by later calls."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from solo_ext.core.files import atomic_write
from solo_ext.lab.evaluation.features import Rows, refuse_non_finite

Batches = Callable[[Sequence[int]], Generator[Rows]]
"""Returns features and targets of some images, batch by batch, in the order of their indices."""
VERSION = 1


class Ranks(NamedTuple):
    """This process among those that extract the same features."""

    rank: int = 0
    world: int = 1


ALONE = Ranks()


class FeatureStore:
    """A folder of features of one dtype; each set of features is found by a digest of its origin.

    A set lies in files of ``rows_per_file`` rows each, such as
    ``<digest>/00000-of-00007.safetensors``, beside ``key.json``. Each file is written atomically
    and contains its own SHA-256: a stopped extraction continues after the last file, and only
    damaged files are made again.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, rows_per_file: int = 8192
    ) -> None:
        self.folder, self.dtype, self.rows_per_file = folder, dtype, rows_per_file

    def features(
        self, key: Mapping[str, Any], count: int, batches: Batches, ranks: Ranks = ALONE
    ) -> Rows:
        """Reads the features of ``key``; missing ones are extracted and stored.

        Memory for all rows is allocated once. Several processes take the files in turns, and the
        first of them reads what the others wrote, or does what they have not done by then: they
        share the folder and nothing else.

        Args:
            key: everything that the features depend on, as JSON values.
            count: number of images.
            batches: extracts the features of some images.
            ranks: this process among several.

        Returns:
            Features (count, D) and targets (count,), int64, on the CPU; processes other than the
            first get no rows.

        Raises:
            ValueError: features are not finite, or ``batches`` gives too few of them.
        """
        whole = {**key, "images": count, "dtype": str(self.dtype), "version": VERSION}
        text = json.dumps(whole, sort_keys=True, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        found = _FeatureSet(self, self.folder / digest[:16], digest, count)
        # This file is for people; the program finds the folder by its digest.
        with contextlib.suppress(OSError):
            _write(found.place / "key.json", lambda path: path.write_text(text + "\n"))
        own = list(found.shards)[ranks.rank :: ranks.world]
        if ranks.rank:
            for _ in found.extracted([file for file in own if found.read(file) is None], batches):
                pass
            return torch.empty(0, 0, dtype=self.dtype), torch.empty(0, dtype=torch.int64)
        found.fill(own, batches)
        for file in reversed(found.shards):
            # The others are still at the first of their files, unless they are lost.
            if file not in own:
                found.fill([file], batches)
        return found.features, found.targets


class _FeatureSet:
    """The files of one key, and in the first process the table of all their rows."""

    def __init__(self, store: FeatureStore, place: Path, digest: str, count: int) -> None:
        self.place, self.digest, self.dtype = place, digest, store.dtype
        size = store.rows_per_file
        files = -(-count // size)
        self.shards = {
            place / f"{i:05d}-of-{files:05d}.safetensors": slice(
                i * size, min((i + 1) * size, count)
            )
            for i in range(files)
        }
        self.count = count
        self.features, self.targets = torch.empty(0, 0), torch.empty(0, dtype=torch.int64)

    def keep(self, file: Path, rows: Rows) -> None:
        if not len(self.features):
            self.features = torch.empty(self.count, rows[0].shape[1], dtype=self.dtype)
            self.targets = torch.empty(self.count, dtype=torch.int64)
        part = self.shards[file]
        self.features[part], self.targets[part] = rows

    def fill(self, files: Sequence[Path], batches: Batches) -> None:
        """Reads files into the table; those that are missing or damaged are extracted."""
        missing = []
        for file in files:
            rows = self.read(file)
            if rows is None:
                missing.append(file)
            else:
                self.keep(file, rows)
        for file, rows in self.extracted(missing, batches):
            self.keep(file, rows)

    def extracted(self, files: Sequence[Path], batches: Batches) -> Iterator[tuple[Path, Rows]]:
        """Extracts the rows of files in one pass; writes each file when it is complete."""
        if not files:
            return
        parts = [self.shards[file] for file in files]
        indices = [i for part in parts for i in range(part.start, part.stop)]
        waiting: list[Rows] = []
        held = 0
        with contextlib.closing(batches(indices)) as stream:
            for file, part in zip(files, parts, strict=True):
                size = part.stop - part.start
                while held < size:
                    batch = next(stream, None)
                    if batch is None:
                        raise ValueError(f"too few features came for {len(indices)} images")
                    waiting.append((batch[0].to(self.dtype), batch[1]))
                    held += len(batch[1])
                features, targets = (torch.cat(column) for column in zip(*waiting, strict=True))
                self._save(file, features[:size], targets[:size])
                yield file, (features[:size], targets[:size])
                waiting, held = [(features[size:], targets[size:])], held - size

    def _save(self, file: Path, features: Tensor, targets: Tensor) -> None:
        refuse_non_finite(features)
        tensors = {"features": features, "targets": targets}
        about = {"key": self.digest, "sha256": _sha256(features, targets)}
        try:
            _write(file, lambda path: save_file(tensors, path, about))
        except OSError as error:
            # Every rank warns: rank 0 does again what only this rank could not write.
            said = f"features are not stored in {str(self.place)!r}: {error}"
            warnings.warn(said, stacklevel=2)

    def read(self, file: Path) -> Rows | None:
        """The rows of a file; ``None`` if it is missing, damaged, or of another set."""
        if not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as opened:
                about = opened.metadata() or {}
                features, targets = opened.get_tensor("features"), opened.get_tensor("targets")
        except Exception:
            # safetensors raises several types of error for a damaged file, which is made again.
            return None
        part = self.shards[file]
        whole = (
            about.get("key") == self.digest
            and features.ndim == 2
            and features.dtype == self.dtype
            and len(features) == len(targets) == part.stop - part.start
            and about.get("sha256") == _sha256(features, targets)
        )
        return (features, targets) if whole else None


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)
