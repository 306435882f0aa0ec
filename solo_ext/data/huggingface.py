"""Data sets of the Hugging Face `datasets` library as map-style data sets of images."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solo_ext.config.schema import HuggingFace
from solo_ext.core.errors import ConfigError, first_line, suggest_name
from solo_ext.data.reading import (
    USUAL_COLUMNS,
    EncodedImages,
    UnreadableImage,
    index_labels,
    read_file,
    usual_column,
)

_KEY = "data.huggingface"
_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev", "test")}
"""Usual names of a split; the first that exists is taken."""
_FILES = (".parquet", ".arrow")


class HuggingFaceImages(EncodedImages):
    """Rows of a ``datasets.Dataset``, which stays memory-mapped; sample i is row i.

    ``image`` and ``label`` name the columns; ``None`` detects them. Without a label a target is -1.

    Raises:
        ConfigError: a column does not exist, or does not hold images or classes.
    """

    def __init__(
        self,
        rows: Any,
        name: str,
        image: str | None = None,
        label: str | None = None,
        *,
        labelled: bool = True,
    ) -> None:
        import datasets

        self.name = name
        self.column = _column(rows.features, "image", image)
        self.classes, self.targets = [], np.full(len(rows), -1)
        if labelled:
            self.targets, self.classes = _labels(rows, _column(rows.features, "label", label))
        self.rows = rows.with_format(None).select_columns([self.column])
        if isinstance(rows.features[self.column], datasets.Image):
            self.rows = self.rows.cast_column(self.column, datasets.Image(decode=False))

    @property
    def fingerprint(self) -> str | None:
        """Changes with the table and the labels; ``None`` if images are separate files."""
        if not len(self) or self._stored(0)[0] is None:
            return None
        labels = hashlib.sha256(self.targets.tobytes()).hexdigest()
        return f"{self.rows._fingerprint} {labels}"

    @property
    def names_digest(self) -> str | None:
        """Changes with the labels and their number, wherever the table lies; it has no names."""
        if self.fingerprint is None:
            return None
        digest = hashlib.sha256(repr([self.column, self.classes]).encode())
        digest.update(self.targets.tobytes())
        return digest.hexdigest()

    def encoded(self, index: int) -> bytes:
        encoded, path = self._stored(index)
        if encoded is None and path is None:
            raise UnreadableImage(self.name_of(index), "this row has no image")
        return read_file(str(path)) if encoded is None else encoded

    def name_of(self, index: int) -> str:
        """The path of an image that is a file, otherwise its row."""
        encoded, path = self._stored(index)
        if encoded is None and path is not None:
            return str(path)
        return f"{self.name}, row {index}" + (f" ({path})" if path else "")

    def _stored(self, index: int) -> tuple[Any, Any]:
        """Encoded bytes and path of an image, either of which may be ``None``."""
        value = self.rows[int(index)][self.column]
        if isinstance(value, Mapping):
            return value.get("bytes"), value.get("path")
        return (None, value) if isinstance(value, str) else (value, None)


def open_huggingface(
    path: str, split: str, settings: HuggingFace, *, labelled: bool, same_path: bool = False
) -> HuggingFaceImages:
    """Opens ``data.format: huggingface``.

    The path is a folder written by ``save_to_disk``, another folder that `datasets` reads (images,
    parquet), a ``.parquet`` file or a pattern of them, an ``.arrow`` file, or a name on the hub.
    If training and validation have the ``same_path``, a split is detected by its usual name only.

    Raises:
        ConfigError: `datasets` is not installed, or data set, split or column do not exist.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.format",
            "huggingface",
            "the package datasets is not installed",
            "pip install 'solo-ext[hf]'",
        ) from None
    loaded = _load(datasets, path, f"data.{split}_path", settings)
    key = f"{_KEY}.{split}_split"
    wanted = settings.train_split if split == "train" else settings.val_split
    if isinstance(loaded, datasets.Dataset):
        # `save_to_disk` and arrow files hold a single split, which serves as either.
        if wanted is not None:
            raise ConfigError(key, wanted, "this data set is a single split", "leave it out")
        chosen = split
    else:
        chosen = wanted or _usual_split(list(loaded), split, key, same_path)
        if chosen not in loaded:
            raise ConfigError(key, chosen, "no such split", suggest_name(chosen, list(loaded)))
        loaded = loaded[chosen]
    columns = settings.image, settings.label
    return HuggingFaceImages(loaded, f"{path} [{chosen}]", *columns, labelled=labelled)


def _usual_split(there: list[str], split: str, key: str, same_path: bool) -> str:
    for name in _SPLITS[split]:
        if name in there:
            return name
    if len(there) == 1 and not same_path:
        return there[0]
    problem = f"no split named {' or '.join(_SPLITS[split])}"
    raise ConfigError(key, None, problem, f"name one of: {', '.join(there)}")


def _load(datasets: Any, path: str, key: str, settings: HuggingFace) -> Any:
    place, kept = Path(path).expanduser(), {"cache_dir": settings.cache_dir}
    local = path.startswith(("/", ".", "~")) or place.suffix in _FILES
    # The library also logs the errors that it raises; here they become one line.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if any((place / f).is_file() for f in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(place))
        if place.is_dir():
            return datasets.load_dataset(str(place), settings.name, **kept)
        if place.suffix == ".arrow" and place.is_file():
            return datasets.Dataset.from_file(str(place))
        if place.suffix == ".parquet" and any(place.parent.glob(place.name)):
            return datasets.load_dataset("parquet", data_files=str(place), **kept)
        if local:
            raise FileNotFoundError("no such folder or file")
        of_hub = {"revision": settings.revision, **kept}
        return datasets.load_dataset(path, settings.name, **of_hub)
    except Exception as error:
        # `datasets` raises different types for missing, private, gated, offline and damaged data.
        told = error.__cause__ if "while generating" in str(error) else error
        said = first_line(told or error)
        problem = said if place.exists() or local else f"not here, and {said}"
        remedy = "give a folder, a .parquet or .arrow file, or a name on the hub"
        raise ConfigError(key, path, problem, remedy) from None


def _column(features: Mapping[str, Any], kind: str, given: str | None) -> str:
    """The column of images or labels: the given one, one with a usual name, or the only one."""
    import datasets

    def is_binary(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return "bytes" in feature
        return getattr(feature, "dtype", None) in ("binary", "large_binary")

    key = f"{_KEY}.{kind}"
    if given is not None:
        if given not in features:
            raise ConfigError(key, given, "no such column", suggest_name(given, features))
        feature = features[given]
        is_path = getattr(feature, "dtype", None) in ("string", "large_string")
        if kind == "image" and not (
            isinstance(feature, datasets.Image) or is_binary(feature) or is_path
        ):
            problem = "no column of images, encoded images or paths"
            raise ConfigError(key, given, problem, f"columns: {', '.join(features)}")
        return given
    if kind == "image":
        found = [n for n, f in features.items() if isinstance(f, datasets.Image)]
        found = found or [n for n, f in features.items() if is_binary(f)]
    else:
        found = [n for n, f in features.items() if isinstance(f, datasets.ClassLabel)]
        found = found or [n for n in features if n in USUAL_COLUMNS[kind]]
    if column := usual_column(kind, found):
        return column
    problem = f"{'several columns' if found else 'no column'} of {kind}s"
    remedy = "name it" + (", or set data.no_labels=true" if kind == "label" else "")
    raise ConfigError(key, None, problem, f"{remedy}; columns: {', '.join(features)}")


def _labels(rows: Any, column: str) -> tuple[NDArray[np.int64], list[str]]:
    """The class of every row, and names of the classes; a negative or missing label is -1."""
    feature = rows.features[column]
    values = rows.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    if hasattr(feature, "names"):
        plain = [-1 if v is None else v for v in values]
        return np.array(plain, dtype=np.int64), list(feature.names)
    if {type(v) for v in values if v is not None} not in (set(), {int}, {bool}, {str}):
        problem = "neither whole numbers nor names"
        remedy = f"columns: {', '.join(rows.features)}"
        raise ConfigError(f"{_KEY}.label", column, problem, remedy)
    return index_labels(values)
