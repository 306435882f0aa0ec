"""Extracts frozen features with a backbone, and stores them in files for later protocols."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from solo_ext.core.files import atomic_write, open_regular
from solo_ext.data.loaders import eval_mode

BatchProgress = Callable[[int, int], object]
Rows = tuple[Tensor, Tensor]
"""Features (n, D) and their classes (n,), int64."""
Batches = Callable[[Sequence[int]], Generator[Rows]]
"""Function of image indices that yields features and targets in their order, batch by batch."""
VERSION = 1
"""Version of the format of the stored files."""


class Features:
    """Finite frozen features (n, D) and classes (n,) of both splits, and the names of C classes.

    A split may be given as a function, which is called when the split is first asked for.

    >>> rows = torch.ones(6, 16), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> Features(lambda: 1 / 0, rows, ["cat", "dog", "fox"]).to("cpu").test[0].shape
    torch.Size([6, 16])
    """

    def __init__(
        self,
        train: Rows | Callable[[], Rows],
        test: Rows | Callable[[], Rows],
        class_names: Sequence[str],
    ) -> None:
        self._train, self._test, self.class_names = train, test, class_names

    @cached_property
    def train(self) -> Rows:
        """Rows of the training images."""
        return self._train() if callable(self._train) else self._train

    @cached_property
    def test(self) -> Rows:
        """Rows of the validation images."""
        return self._test() if callable(self._test) else self._test

    @property
    def present(self) -> list[int]:
        """Numbers of the classes that have an image; a list's labels may begin at 1."""
        return sorted({*self.train[1].tolist(), *self.test[1].tolist()})

    def to(self, device: str) -> Features:
        """The same features on a device; a split is copied when it is asked for."""

        def moved(rows: Rows) -> Rows:
            return rows[0].to(device), rows[1].to(device)

        return Features(lambda: moved(self.train), lambda: moved(self.test), self.class_names)


def extract_features(
    backbone: nn.Module,
    loader: Any,
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
) -> Rows:
    """Runs a backbone in eval mode over a loader and collects its outputs and the targets.

    Args:
        backbone: maps images (B, C, H, W) to (B, D), or to (B, D, H, W), which is averaged over H
            and W.
        loader: has a length and yields ``(images, targets)``.
        device: where the backbone runs, and stays.
        progress: called with the number of batches done and in all.

    Raises:
        ValueError: an output has another shape, or features are not finite.

    >>> batches = [(torch.ones(4, 3, 8, 8), torch.arange(4)), (torch.ones(2, 3, 8, 8), [4, 5])]
    >>> features, targets = extract_features(nn.Identity(), batches)
    >>> features.shape, targets.tolist()
    (torch.Size([6, 3]), [0, 1, 2, 3, 4, 5])
    """
    stream = feature_batches(backbone, loader, device=device, progress=progress)
    features, targets = (torch.cat(column) for column in zip(*stream, strict=True))
    refuse_non_finite(features)
    return features, targets


# no_grad: a tensor that a module caches under inference_mode could not be used in training later.
@torch.no_grad()
def feature_batches(
    backbone: nn.Module,
    loader: Any,
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
) -> Generator[Rows]:
    """The batches of :func:`extract_features` one by one, in fp32.

    Close the generator or run it to its end: it then restores the mode of every submodule.

    >>> batches = [(torch.ones(4, 3, 8, 8), torch.arange(4))]
    >>> [tuple(features.shape) for features, _ in feature_batches(nn.Identity(), batches)]
    [(4, 3)]
    """
    backbone.to(device)
    with eval_mode(backbone):
        for done, (images, labels) in enumerate(loader, start=1):
            targets = torch.as_tensor(labels).long().cpu()
            features = pooled(backbone(images.to(device)), len(targets)).cpu()
            if progress is not None:
                progress(done, len(loader))
            yield features, targets


def pooled(output: Tensor, rows: int) -> Tensor:
    """Features (B, D), fp32, from a backbone's output; feature maps are averaged.

    Raises:
        ValueError: the output is neither (B, D) nor (B, D, H, W), or of another B than ``rows``.

    >>> pooled(torch.ones(4, 16, 7, 7, dtype=torch.bfloat16), 4).shape
    torch.Size([4, 16])
    """
    if output.ndim not in (2, 4) or len(output) != rows:
        raise ValueError(
            f"The backbone returned {tuple(output.shape)} for {rows} images; it must return "
            "(B, D) or (B, D, H, W)."
        )
    features = output.float()
    return features if features.ndim == 2 else features.mean(dim=(2, 3))


def refuse_non_finite(features: Tensor) -> None:
    """Raises a ``ValueError`` if features (n, D) contain infinities or NaN.

    >>> refuse_non_finite(torch.tensor([[1.0, 2.0], [0.0, torch.inf]]))
    Traceback (most recent call last):
        ...
    ValueError: 1 of 2 rows of features are not finite; check the weights of the backbone ...
    """
    broken = int((~features.isfinite().all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"{broken} of {len(features)} rows of features are not finite; check the weights of "
            "the backbone and its input normalisation."
        )


class Ranks(NamedTuple):
    """Rank of this process, and number of the processes that extract the same features.

    >>> Ranks()
    Ranks(rank=0, world=1)
    """

    rank: int = 0
    world: int = 1


ALONE = Ranks()


class FeatureStore:
    """Stores the features of some images in a folder named by a digest of what they depend on.

    The folder holds files of ``rows_per_file`` rows, such as
    ``<digest>/00000-of-00007.safetensors``. Each file is written atomically and contains its own
    SHA-256: a stopped extraction continues after the last file, and only damaged files are made
    again.

    Args:
        folder: folder that holds all stored features.
        key: everything that the features depend on, as JSON values.
        count: number of images.
        rows_per_file: number of rows in each file.

    >>> import tempfile
    >>> def batches(indices):
    ...     yield torch.eye(4)[indices], torch.tensor(indices)
    >>> store = FeatureStore(Path(tempfile.mkdtemp()), {"model": "a"}, count=4)
    >>> features, targets = store.features(batches)
    >>> features.shape, targets.tolist(), len(list(store.place.glob("*.safetensors")))
    (torch.Size([4, 4]), [0, 1, 2, 3], 1)
    """

    def __init__(
        self, folder: Path, key: Mapping[str, Any], count: int, rows_per_file: int = 8192
    ) -> None:
        whole = {**key, "images": count, "version": VERSION}
        text = json.dumps(whole, sort_keys=True, indent=1)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.place, self.count = folder / self.digest[:16], count
        files = -(-count // rows_per_file)
        self.shards = {
            self.place / f"{i:05d}-of-{files:05d}.safetensors": slice(
                i * rows_per_file, min((i + 1) * rows_per_file, count)
            )
            for i in range(files)
        }
        self._table: Rows | None = None

    def features(self, batches: Batches, ranks: Ranks = ALONE) -> Rows:
        """Reads the features (count, D) and targets (count,); extracts and stores missing ones.

        Several processes take the files in turns. Rank 0 then reads the files of the others, and
        extracts those that are still missing, because the ranks share nothing but the folder. Only
        rank 0 gets rows.

        Raises:
            ValueError: features are not finite, or ``batches`` gives too few of them.
        """
        own = list(self.shards)[ranks.rank :: ranks.world]
        if ranks.rank:
            for _ in self._extracted([file for file in own if self._read(file) is None], batches):
                pass
        else:
            self._fill(own, batches)
            for file in reversed(self.shards):
                # Begin with the last file: the other processes write theirs from the first one on.
                if file not in own:
                    self._fill([file], batches)
        return self._table or (torch.empty(0, 0), torch.empty(0).long())

    def _fill(self, files: Sequence[Path], batches: Batches) -> None:
        missing = []
        for file in files:
            if (rows := self._read(file)) is None:
                missing.append(file)
            else:
                self._keep(file, rows)
        for file, rows in self._extracted(missing, batches):
            self._keep(file, rows)

    def _keep(self, file: Path, rows: Rows) -> None:
        if self._table is None:
            features = torch.empty(self.count, rows[0].shape[1])
            self._table = features, torch.empty(self.count, dtype=torch.int64)
        for column, part in zip(self._table, rows, strict=True):
            column[self.shards[file]] = part

    def _extracted(self, files: Sequence[Path], batches: Batches) -> Iterator[tuple[Path, Rows]]:
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
                    waiting.append(batch)
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
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, lambda path: save_file(tensors, path, about))
        except OSError as error:
            # Every rank warns, because rank 0 extracts again what this rank could not write.
            warnings.warn(f"features are not stored in {str(self.place)!r}: {error}", stacklevel=2)

    def _read(self, file: Path) -> Rows | None:
        """The rows of a file; ``None`` if it is missing, damaged, or of other features."""
        try:
            open_regular(file).close()
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
            and features.dtype == torch.float32
            and len(features) == len(targets) == part.stop - part.start
            and about.get("sha256") == _sha256(features, targets)
        )
        return (features, targets) if whole else None


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
