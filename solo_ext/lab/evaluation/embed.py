"""``solo-ext embed``: writes features, labels and clusters of images to a Parquet file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from solo_ext import __version__
from solo_ext.config.check import validated
from solo_ext.config.schema import CommonConfig
from solo_ext.core.draws import derive_seed, permutation
from solo_ext.core.errors import UserError, first_line
from solo_ext.core.types import Section
from solo_ext.data.folders import (
    ImageFiles,
    are_plainly_classes,
    class_folders,
    file_list,
    list_has_labels,
    unlabelled_folders,
)
from solo_ext.data.images import class_names, images_fingerprint, open_images, part_of
from solo_ext.data.loaders import fixed_loader
from solo_ext.data.reading import Images, SkipUnreadable, name_of, targets_of, unwrap_dataset
from solo_ext.data.transforms import fixed_view
from solo_ext.host.names import PREFIX
from solo_ext.lab.evaluation.clusters import ClusterNetwork, clusters_of
from solo_ext.lab.evaluation.context import _OF_FILES, Progress, _device, evaluation_config
from solo_ext.lab.evaluation.features import ALONE, feature_batches, pooled, refuse_non_finite
from solo_ext.lab.evaluation.models import PIXELS, EvalRun, Model, ModelRun, open_model
from solo_ext.lab.evaluation.parquet import (
    Integers,
    PartsWriter,
    Values,
    written_metadata,
)
from solo_ext.lab.evaluation.sample import Clusters, Sample
from solo_ext.pretrained.files import state_digest

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
"""Version of the columns."""
INSTALL = "pip install 'solo-ext[embed]'"


class EmbedData(Section):
    """``data``: how the images are read.

    Attributes:
        format: how image files are read; null: as in pretraining.
        unreadable: whether an unreadable image ends the command, or is left out; null: as in
            pretraining.

    >>> EmbedData(unreadable="skip").format is None
    True
    """

    format: Literal["image_folder", "dali"] | None = None
    unreadable: Literal["refuse", "skip"] | None = None


class EmbedRun(ModelRun):
    """Settings of ``solo-ext embed``; by default as in pretraining.

    Attributes:
        clusters: whether a run's clusters are written too.

    >>> EmbedRun(batch_size=64).clusters
    True
    """

    data: EmbedData = EmbedData()
    clusters: bool = True


@dataclass(frozen=True)
class Embedded:
    """What :func:`embed` has written.

    Attributes:
        out: the file.
        images: number of rows.
        features_dim: D of the embeddings.
        clusters: names of the granularities, such as ``["100", "200"]``; empty without clusters.
        unreadable: names of the images that were left out.
        resumed: number of images that earlier calls have done.
        seconds: time of this call.

    >>> Embedded(Path("a.parquet"), 60, 512, [], [], 0, 1.5).images
    60
    """

    out: Path
    images: int
    features_dim: int
    clusters: list[str]
    unreadable: list[str]
    resumed: int
    seconds: float


def embed(
    model: str | Path | Model,
    images: str | Path | Sequence[str | Path] | None = None,
    out: str | Path = "embeddings.parquet",
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> Embedded:
    """Writes the features of images to a Parquet file: one row per image, in their order.

    Images are seen once, in the fixed view of an evaluation. Columns:

    - ``path`` (string): the image's path, as it can be opened from the working directory;
    - ``index`` (int64): number of the image among all, from 0;
    - ``label`` (string): name of its class, null without one;
    - ``embedding`` (list of D float32): its features, as ``solo-ext eval`` measures them;
    - of a run with clusters, per granularity K ``cluster_<K>`` (int32), ``distance_<K>`` (float32),
      the Euclidean distance of its unit embedding to the mean of that cluster, in [0, 2], and
      ``concentration_<K>`` (float32) of that cluster; all as
      :class:`~solo_ext.lab.evaluation.clusters.ClusterNetwork` finds them.

    The metadata ``solo_ext`` is a JSON text that says what made the file. After a stop, the same
    call continues with the first image that is not stored; if the file is complete, it does
    nothing. Only a file of this function is replaced.

    Args:
        model: a run directory, a checkpoint, ``timm/<model>``, ``pixels``, or a loaded model.
        images: folders of any depth, or one list of images; ``None``: the run's training images.
        out: the file.
        settings: fields of :class:`EmbedRun`.
        progress: called with the name of the task, its images done and in all.

    Raises:
        UserError: wrong settings, no images, an unreadable image (unless ``data.unreadable`` is
            ``skip``), pyarrow is not installed, or ``out`` is a file of something else.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for number in range(2):
    ...     Image.new("RGB", (8, 8), "red").save(root / f"{number}.png")
    >>> done = embed("pixels", root, root / "a.parquet", {"crop_size": 8, "num_workers": 0})
    >>> done.images, done.features_dim
    (2, 192)
    >>> import pyarrow.parquet as pq
    >>> pq.read_table(done.out, columns=["index", "label"]).to_pydict()
    {'index': [0, 1], 'label': [None, None]}
    """
    begin = time.monotonic()
    given, out = validated(EmbedRun, settings or {}), _writable(Path(out))
    paths = [images] if isinstance(images, str | Path) else list(images or ())
    model, cfg, found, device = _opened(model, given, paths)
    clusters = clusters_of(model) if given.clusters else None
    columns = _Columns(found, model.features_dim, clusters)
    identity = _identity(model, cfg, found, clusters)
    writer = PartsWriter(out, *identity, columns.table, len(found), columns.width)
    start, held = len(found), writer.finished()
    if held is None:
        with writer:
            start = writer.start
            part = part_of(found, np.arange(start, len(found))) if start else found
            loader = fixed_loader(cfg, part, batch_size=given.batch_size)
            network = model.backbone if clusters is None else _Both(model.backbone, clusters)
            for indices, rows in _batches(network, loader, device) if len(part) else ():
                writer.add(indices + start, rows)
                progress("images", int(indices[-1]) + 1 + start, len(found))
            held = writer.close()
    return Embedded(
        out,
        held.rows,
        model.features_dim,
        columns.names,
        [name_of(found, index) for index in held.missing],
        start,
        time.monotonic() - begin,
    )


def embed_sample(
    model: str | Path | Model,
    images: Sequence[str | Path] = (),
    settings: Mapping[str, Any] | None = None,
    *,
    samples: int = 5000,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Sample:
    """Embeds up to ``samples`` images, drawn with ``seed``, as :func:`embed` does.

    Raises:
        UserError: as :func:`embed`.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for number in range(9):
    ...     Image.new("RGB", (8, 8), "red").save(root / f"{number}.png")
    >>> found = embed_sample("pixels", [root], {"crop_size": 8, "num_workers": 0}, samples=5)
    >>> found.embeddings.shape, found.clusters
    ((5, 192), {})
    """
    given = validated(EmbedRun, settings or {})
    model, cfg, found, device = _opened(model, given, images)
    if len(found) > samples:
        places = permutation(len(found), derive_seed(seed))(np.arange(samples))
        found = part_of(found, np.sort(places))
    clusters = clusters_of(model) if given.clusters else None
    network = model.backbone if clusters is None else _Both(model.backbone, clusters)
    indices, values = [], []
    loader = fixed_loader(cfg, found, batch_size=given.batch_size)
    for index, rows in _batches(network, loader, device):
        indices.append(index)
        values.append(rows)
        progress("images", int(index[-1]) + 1, len(found))
    every, dim = np.concatenate(values), model.features_dim
    held: dict[int, Clusters] = {}
    concentration = [] if clusters is None else clusters.concentration
    for m, phi in enumerate(concentration):
        own = every[:, dim + m].astype(np.int64)
        distances = every[:, dim + len(concentration) + m]
        held[len(phi)] = Clusters(own, distances, phi.cpu().numpy()[own])
    drawn: Images = found
    places = np.concatenate(indices).tolist()
    names, targets = class_names(drawn), targets_of(drawn)
    labels = [names[targets[place]] if targets[place] >= 0 else None for place in places]
    return Sample(
        [name_of(drawn, place) for place in places],
        every[:, :dim],
        lambda row: drawn[places[row]][0],
        labels if any(labels) else (),
        held,
    )


def refuse_without_atlas() -> None:
    """Raises a ``UserError`` if Embedding Atlas is not installed.

    >>> from unittest import mock
    >>> with mock.patch(f"{__name__}.find_spec", return_value=None):
    ...     refuse_without_atlas()
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: Embedding Atlas is not installed; pip install 'solo-ext[atlas]'
    """
    if find_spec("embedding_atlas") is None:
        raise UserError("Embedding Atlas is not installed; pip install 'solo-ext[atlas]'")


def open_in_atlas(file: Path) -> None:
    """Shows a file of :func:`embed` in Embedding Atlas, until Ctrl-C ends its server.

    >>> from unittest import mock
    >>> with mock.patch("subprocess.run") as run:
    ...     open_in_atlas(Path("a.parquet"))
    >>> run.call_args.args[0][2:]
    ['embedding_atlas.cli', 'a.parquet', '--vector', 'embedding', '--text', 'path']
    """
    words = [str(file), "--vector", "embedding", "--text", "path"]
    # Atlas ends with the same Ctrl-C, which the terminal sends to both.
    with contextlib.suppress(KeyboardInterrupt):
        # Standard output is for the command's own document.
        subprocess.run([sys.executable, "-m", "embedding_atlas.cli", *words], check=False, stdout=2)


def _writable(out: Path) -> Path:
    if find_spec("pyarrow") is None:
        raise UserError(f"pyarrow, which writes Parquet files, is not installed; {INSTALL}")
    if out.is_dir():
        raise UserError(
            f"{str(out)!r} is a folder; name a file, such as {str(out / 'a.parquet')!r}"
        )
    written_metadata(out)
    return out


def _opened(
    model: str | Path | Model, given: EmbedRun, paths: Sequence[str | Path]
) -> tuple[Model, CommonConfig, Images, str]:
    """The model, the config of its images and their view, the images, and the device."""
    # List the images first, so that a wrong path is found before the model is loaded.
    listed = _images_of(paths) if paths else None
    device = _device(given.device, ALONE)
    data: dict[str, Any] = given.data.model_dump()
    if paths:
        data |= {"train_path": str(paths[0]), "val_path": str(paths[0])}
    own = {k: getattr(given, k) for k in ModelRun.model_fields}
    shared = EvalRun(**{**own, "data": data})
    if not isinstance(model, Model):
        name = str(model)
        baseline = name == PIXELS or (name.startswith(PREFIX) and not Path(name).exists())
        if baseline and not paths:
            raise UserError(f"{name} was trained on no images here: name some after it")
        model = open_model(name, shared)
    if paths and shared.data.format is None:
        trained = model.cfg.data.format
        shared.data.format = trained if trained in _OF_FILES else "image_folder"
    cfg = evaluation_config(model.cfg, shared)
    found: Images = open_images(cfg.data, "train") if listed is None else listed
    if cfg.data.unreadable == "skip" and not isinstance(found, SkipUnreadable):
        found = SkipUnreadable(found)
    return model, cfg, found, device


def _identity(
    model: Model, cfg: CommonConfig, images: Images, clusters: ClusterNetwork | None
) -> tuple[str, dict[str, Any]]:
    """A digest of everything that the rows depend on, and what the file says about itself."""
    size, (mean, std) = fixed_view(cfg)
    about: dict[str, Any] = {
        "model": model.name,
        "checkpoint": model.checkpoint,
        "checkpoint_sha256": model.digest,
        "method": cfg.method,
        "epoch": model.epoch,
        "backbone": cfg.backbone.model_dump(),
        "view": {"size": size, "mean": list(mean), "std": list(std)},
        "clusters": [] if clusters is None else clusters.names,
    }
    files: Any = images
    while isinstance(files, SkipUnreadable):
        files = files.images
    key = {
        **about,
        "version": VERSION,
        "clusters": clusters and state_digest(clusters.state_dict()),
        # DALI's pixels differ from Pillow's by rounding.
        "dali": cfg.data.format == "dali",
        # Images that cannot be identified may be others next time.
        "images": images_fingerprint(files) or uuid.uuid4().hex,
        # The same files have other paths in another working directory.
        "first": name_of(images, 0),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return digest[:16], {"solo_ext": __version__, **about}


class _Both(nn.Module):
    """Features (N, D) of a backbone, then numbers of clusters (N, M), then distances (N, M)."""

    def __init__(self, backbone: nn.Module, clusters: ClusterNetwork) -> None:
        super().__init__()
        self.backbone, self.clusters = backbone, clusters

    def forward(self, images: Tensor) -> Tensor:
        features = pooled(self.backbone(images), len(images))
        near = self.clusters.nearest(self.clusters(images))
        # fp32 holds every whole number up to 2^24.
        return torch.cat((features, near.clusters.T.float(), near.distances.T), dim=1)


def _batches(network: nn.Module, loader: Any, device: str) -> Iterator[tuple[Integers, Values]]:
    """Indices (n,) of the readable images of each batch, and their rows (n, W)."""
    place = 0
    with contextlib.closing(feature_batches(network, loader, device=device)) as stream:
        for rows, _ in stream:
            # The loader says which images it has left out so far.
            skipped = loader.skipped[bisect_left(loader.skipped, place) :]
            indices = np.arange(place, place + len(rows) + len(skipped))
            indices = np.setdiff1d(indices, skipped)[: len(rows)]
            place = int(indices[-1]) + 1
            yield indices, rows.numpy()


class _Columns:
    """Makes tables of rows of ``width`` values; ``names`` are those of the granularities."""

    def __init__(self, images: Images, dim: int, clusters: ClusterNetwork | None) -> None:
        self.images, self.dim = images, dim
        self.targets = np.asarray(targets_of(images), np.int64)
        self.classes = getattr(unwrap_dataset(images, ())[0], "classes", None) or []
        self.names = [] if clusters is None else clusters.names
        self.width = dim + 2 * len(self.names)
        self.concentration = (
            [] if clusters is None else [phi.numpy() for phi in clusters.concentration]
        )

    def table(self, indices: Integers, values: Values) -> pa.Table:
        import pyarrow as pa

        try:
            # Once for many rows: a look at each batch would cost as much as a small network.
            refuse_non_finite(torch.from_numpy(values))
        except ValueError as error:
            raise UserError(first_line(error)) from None
        places, dim, count = indices.tolist(), self.dim, len(self.names)
        flat = pa.array(np.ascontiguousarray(values[:, :dim]).ravel())
        columns = {
            "path": pa.array([_utf8(name_of(self.images, i)) for i in places], pa.string()),
            "index": pa.array(indices, pa.int64()),
            "label": pa.array([self._label(int(self.targets[i])) for i in places], pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(flat, dim),
        }
        for m, name in enumerate(self.names):
            clusters = values[:, dim + m].astype(np.int32)
            columns[f"cluster_{name}"] = pa.array(clusters)
            columns[f"distance_{name}"] = pa.array(values[:, dim + count + m])
            columns[f"concentration_{name}"] = pa.array(self.concentration[m][clusters])
        return pa.table(columns)

    def _label(self, target: int) -> str | None:
        if target < 0:
            return None
        return _utf8(self.classes[target]) if target < len(self.classes) else str(target)


def _utf8(name: str) -> str:
    """A file's name need not be UTF-8, a text in Parquet has to be."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _images_of(paths: Sequence[str | Path]) -> ImageFiles:
    """Images of folders of any depth, of plain class folders with labels, or of a list."""
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.is_dir() and not (root.is_file() and len(roots) == 1):
            raise UserError(f"{str(root)!r}: no such folder; give folders of images, or one list")
    first = roots[0]
    if first.is_file():
        return file_list(first, "IMAGES", list_has_labels(first), present=False)
    if len(roots) == 1 and are_plainly_classes(first):
        return class_folders(first, "IMAGES")
    found = unlabelled_folders(roots, "IMAGES")
    if not len(found):
        raise UserError(f"{str(first)!r}: no image in it; give a folder with images")
    return found
