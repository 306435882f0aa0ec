"""Features on disk: extracted once, then read by every protocol and by later calls."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from solo_ext.core.files import atomic_write

Batches = Callable[[Sequence[int]], Generator[tuple[Tensor, Tensor]]]
"""Returns features and targets of some images, batch by batch, in the order of their indices."""
VERSION = 1
_WAIT = 0.2
_STALLED = 120.0
"""Seconds without a new file of another process, after which this one takes over its share; longer
if a file takes longer here too."""


class Ranks(NamedTuple):
    """This process among those that extract the same features."""

    rank: int = 0
    world: int = 1


ALONE = Ranks()


class FeatureStore:
    """A folder of features; each set of features is found by a digest of its origin.

    A set lies in files of ``rows_per_file`` rows each, such as
    ``<digest>/00000-of-00007.safetensors``, beside ``key.json``. Each file is written atomically
    and contains its own SHA-256: a stopped extraction continues after the last file, and only
    damaged files are made again.

    Args:
        folder: created on first use.
        dtype: of the features, on disk and in memory.
        rows_per_file: at least 1.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, rows_per_file: int = 8192
    ) -> None:
        self.folder, self.dtype, self.rows_per_file = folder, dtype, rows_per_file

    def features(
        self, key: Mapping[str, Any], count: int, batches: Batches, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """Reads the features of ``key``; missing ones are extracted and stored.

        Memory for all rows is allocated once. Several processes take the files in turns, and the
        first of them reads what the others wrote: they share the folder and nothing else.

        Args:
            key: everything that the features depend on, as JSON values.
            count: number of images.
            batches: extracts the features of some images.
            ranks: this process among several.

        Returns:
            Features (count, D) and targets (count,), int64, on the CPU; processes other than the
            first get no rows.

        Raises:
            ValueError: features are not finite, or ``batches`` gives another number of them.
        """
        whole = {**key, "images": count, "dtype": str(self.dtype), "version": VERSION}
        text = json.dumps(whole, sort_keys=True, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        found = _FeatureSet(self, self.folder / digest[:16], digest, count, ranks)
        # This file is for people; the program finds the folder by its digest.
        with contextlib.suppress(OSError):
            _write(found.place / "key.json", lambda path: path.write_text(text + "\n"))
        return found.read(batches)


class _FeatureSet:
    """The files of one key; in the first process also the rows of all of them."""

    def __init__(
        self, store: FeatureStore, place: Path, digest: str, count: int, ranks: Ranks
    ) -> None:
        self.place, self.digest, self.dtype = place, digest, store.dtype
        self.count, self.ranks = count, ranks
        size = store.rows_per_file
        files = -(-count // size)
        self.shards = {
            place / f"{i:05d}-of-{files:05d}.safetensors": range(count)[i * size : (i + 1) * size]
            for i in range(files)
        }
        self.features: Tensor | None = None
        self.writable = True
        self.targets = torch.empty(count if ranks.rank == 0 else 0, dtype=torch.int64)

    def read(self, batches: Batches) -> tuple[Tensor, Tensor]:
        own = list(self.shards)[self.ranks.rank :: self.ranks.world]
        if self.ranks.rank:
            for file in own:
                if self._held(file) is None:
                    self._extract_aside(file, batches)
            return torch.empty(0, 0, dtype=self.dtype), self.targets
        missing = [file for file in own if not self._take(file)]
        begin = time.monotonic()
        self._extract(missing, batches)
        per_file = (time.monotonic() - begin) / max(1, len(missing))
        others = [file for file in self.shards if file not in own]
        self._extract(self._waited_for(others, max(_STALLED, 3 * per_file)), batches)
        assert self.features is not None
        return self.features, self.targets

    def _waited_for(self, files: list[Path], patience: float) -> list[Path]:
        """Reads what other processes write; returns the files that none of them wrote."""
        last = time.monotonic()
        while files:
            left = [file for file in files if not self._take(file)]
            if len(left) < len(files):
                files, last = left, time.monotonic()
            elif not self.writable or time.monotonic() - last > patience:
                # If this process cannot write, the others cannot either.
                break
            else:
                time.sleep(_WAIT)
        return files

    def _take(self, file: Path) -> bool:
        """Reads a file into the table of all rows; returns whether it was intact."""
        found = self._held(file)
        if found is None or (
            self.features is not None and found[0].shape[1] != self.features.shape[1]
        ):
            return False
        part = self._slice(file)
        self._all(found[0].shape[1])[part], self.targets[part] = found
        return True

    def _all(self, width: int) -> Tensor:
        if self.features is None:
            self.features = torch.empty(self.count, width, dtype=self.dtype)
        return self.features

    def _slice(self, file: Path) -> slice:
        rows = self.shards[file]
        return slice(rows.start, rows.stop)

    def _extract(self, files: list[Path], batches: Batches) -> None:
        """Extracts into the table of all rows in one pass; writes each file when it is complete."""
        if not files:
            return
        indices = [i for file in files for i in self.shards[file]]
        done, waiting = 0, list(files)
        with closing(batches(indices)) as stream:
            for features, targets in stream:
                rows = indices[done : done + len(features)]
                done += len(features)
                if done > len(indices):
                    break
                held = self._all(features.shape[1])
                held[rows], self.targets[rows] = features.to(self.dtype), targets
                while waiting and (
                    done == len(indices) or indices[done] not in self.shards[waiting[0]]
                ):
                    part = self._slice(waiting[0])
                    self._save(waiting.pop(0), held[part], self.targets[part])
        _check_count(done, len(indices))

    def _extract_aside(self, file: Path, batches: Batches) -> None:
        """Extracts the rows of one file without allocating memory for all rows."""
        rows = self.shards[file]
        features, targets = zip(*batches(list(rows)), strict=True)
        _check_count(sum(map(len, features)), len(rows))
        self._save(file, torch.cat(features).to(self.dtype), torch.cat(targets))

    def _save(self, file: Path, features: Tensor, targets: Tensor) -> None:
        broken = int((~features.isfinite().all(dim=1)).sum())
        if broken:
            raise ValueError(
                f"{broken} of {len(features)} rows of features are not finite; check the weights "
                "of the backbone and its input normalisation."
            )
        tensors = {"features": features, "targets": targets}
        about = {"key": self.digest, "sha256": _sha256(features, targets)}
        try:
            _write(file, lambda path: save_file(tensors, path, about))
        except OSError as error:
            self.writable = False
            # Every rank warns: rank 0 may be waiting for a file that only this rank cannot write.
            said = f"features are not stored in {str(self.place)!r}: {error}"
            warnings.warn(said, stacklevel=2)

    def _held(self, file: Path) -> tuple[Tensor, Tensor] | None:
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
        whole = (
            about.get("key") == self.digest
            and features.ndim == 2
            and features.dtype == self.dtype
            and len(features) == len(targets) == len(self.shards[file])
            and about.get("sha256") == _sha256(features, targets)
        )
        return (features, targets) if whole else None


def _check_count(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{found} features came for {expected} images; the loader must not skip.")


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)
