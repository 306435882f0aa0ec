"""Data sets of the Hugging Face `datasets` library as map-style data sets of images."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from solo_ext.config.schema import HuggingFace
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.reading import Item, UnreadableImage, decode_image, load_image

_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "target", "targets", "class", "cls")
_KEY = "data.huggingface"
_VALIDATION = ("validation", "valid", "val", "dev", "test")
"""Usual names of a validation split; the first that exists is taken."""
_FILES = (".parquet", ".arrow")


class HuggingFaceImages(Dataset[Item]):
    """Rows of a ``datasets.Dataset``; sample i is row i.

    The table stays memory-mapped, and all workers map the same file; images are decoded on access.

    Attributes:
        classes: names by target; empty without labels.
        targets: (n,), int64; -1 without a label.

    Args:
        rows: the data set.
        name: its name in messages.
        image: column of images; ``None`` finds it.
        label: column of labels; ``None`` finds it.
        labelled: whether labels are read.

    Raises:
        ConfigError: a column does not exist, or is not of images or classes.
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
        self.column = _image_column(rows.features, image)
        self.classes: list[str] = []
        self.targets: NDArray[np.int64] = np.full(len(rows), -1)
        if labelled:
            column = _label_column(rows.features, label)
            self.classes, self.targets = _labels(rows, column)
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

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Item:
        encoded, path = self._stored(index)
        if encoded is not None:
            image = decode_image(encoded, self._name(index, path))
        elif path is not None:
            image = load_image(path)
        else:
            raise UnreadableImage(self._name(index, None), "this row has no image")
        return image, int(self.targets[index])

    def name_of(self, index: int) -> str:
        """The path of an image that is a file, otherwise its row."""
        encoded, path = self._stored(index)
        return path if encoded is None and path is not None else self._name(index, path)

    def _stored(self, index: int) -> tuple[bytes | None, str | None]:
        """Encoded bytes or a path."""
        value = self.rows[int(index)][self.column]
        if isinstance(value, Mapping):
            return value.get("bytes"), value.get("path")
        return (None, value) if isinstance(value, str) else (value, None)

    def _name(self, index: int, path: str | None) -> str:
        return f"{self.name}, row {index}" + (f" ({path})" if path else "")


def open_huggingface(
    path: str, split: str, settings: HuggingFace, *, labelled: bool, same_path: bool = False
) -> HuggingFaceImages:
    """Opens ``data.format: huggingface``.

    Args:
        path: a folder written by ``save_to_disk``, another folder that `datasets` reads (images,
            parquet), a ``.parquet`` file or a pattern of them, an ``.arrow`` file, or the name of a
            data set on the hub.
        split: ``train`` or ``val``.
        settings: the section ``data.huggingface``.
        labelled: whether labels are read.
        same_path: whether training and validation have the same path.

    Raises:
        ConfigError: `datasets` is not installed, or data set, split or column do not exist.
    """
    rows, found = _load_split(path, split, settings, same_path)
    columns = settings.image, settings.label
    return HuggingFaceImages(rows, f"{path} [{found}]", *columns, labelled=labelled)


def _load_split(path: str, split: str, settings: HuggingFace, same_path: bool) -> tuple[Any, str]:
    """A ``datasets.Dataset``, its table memory-mapped, and the name of its split."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.format",
            "huggingface",
            "the package datasets is not installed",
            "pip install 'solo-ext[hf]'",
        ) from None
    with _quiet(datasets):
        loaded = _load(datasets, path, f"data.{split}_path", settings)
    wanted = settings.train_split if split == "train" else settings.val_split
    if isinstance(loaded, datasets.Dataset):
        # `save_to_disk` and arrow files hold a single split, which serves as either.
        if wanted is not None:
            raise ConfigError(
                f"{_KEY}.{split}_split", wanted, "this data set is a single split", "leave it out"
            )
        return loaded, split
    chosen = _split_of(list(loaded), split, wanted, same_path)
    return loaded[chosen], chosen


def _split_of(there: list[str], split: str, wanted: str | None, same_path: bool) -> str:
    key = f"{_KEY}.{split}_split"
    if wanted is not None:
        if wanted not in there:
            raise ConfigError(key, wanted, "no such split", nearest(wanted, there))
        return wanted
    usual = ("train",) if split == "train" else _VALIDATION
    for name in usual:
        if name in there:
            return name
    if len(there) == 1 and not same_path:
        return there[0]
    problem = f"no split named {' or '.join(usual)}"
    raise ConfigError(key, None, problem, f"name one of: {', '.join(there)}")


def _load(datasets: Any, path: str, key: str, settings: HuggingFace) -> Any:
    place = Path(path).expanduser()
    kept = {"cache_dir": settings.cache_dir}
    try:
        if any((place / f).is_file() for f in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(place))
        if place.is_dir():
            return datasets.load_dataset(str(place), settings.name, **kept)
        if place.suffix == ".arrow" and place.is_file():
            return datasets.Dataset.from_file(str(place))
        if place.suffix == ".parquet" and any(place.parent.glob(place.name)):
            return datasets.load_dataset("parquet", data_files=str(place), **kept)
        if not _may_be_a_name(path):
            remedy = "give a folder, a .parquet or .arrow file, or a name on the hub"
            raise ConfigError(key, path, "no such folder or file", remedy)
        of_hub = {"revision": settings.revision, **kept}
        return datasets.load_dataset(path, settings.name, **of_hub)
    except ConfigError:
        raise
    except Exception as error:
        # `datasets` raises different types for missing, private, gated, offline and damaged data.
        told = error.__cause__ if "while generating" in str(error) else error
        said = (str(told or error).strip() or type(error).__name__).splitlines()[0]
        problem = said if place.exists() or place.suffix in _FILES else f"not here, and {said}"
        raise ConfigError(
            key, path, problem, "give what `datasets.load_dataset` or `load_from_disk` takes"
        ) from None


def _may_be_a_name(path: str) -> bool:
    """Whether the text can be ``<data set>`` or ``<owner>/<data set>``."""
    outside = path.startswith(("/", ".", "~")) or path.endswith(_FILES)
    return not outside and path.count("/") <= 1 and "\\" not in path


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Silences progress bars outside a terminal, and the library's own error messages."""
    held = datasets.logging.get_verbosity()
    bars = datasets.is_progress_bar_enabled() and not sys.stderr.isatty()
    # The hub's client logs its attempts under another name, which is left as it is.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(held)
        if bars:
            datasets.enable_progress_bars()


def _image_column(features: Mapping[str, Any], given: str | None) -> str:
    import datasets

    def holds_images(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return "bytes" in feature
        return getattr(feature, "dtype", None) in ("binary", "large_binary")

    if given is not None:
        feature = _there(features, "image", given)
        text = getattr(feature, "dtype", None) in ("string", "large_string")
        if not (isinstance(feature, datasets.Image) or holds_images(feature) or text):
            raise ConfigError(
                f"{_KEY}.image",
                given,
                "no column of images, encoded images or paths",
                _columns(features),
            )
        return given
    found = [n for n, f in features.items() if isinstance(f, datasets.Image)]
    found = found or [n for n, f in features.items() if holds_images(f)]
    return _only(found, features, "image", _IMAGE_NAMES, "name it")


def _label_column(features: Mapping[str, Any], given: str | None) -> str:
    import datasets

    if given is not None:
        _there(features, "label", given)
        return given
    found = [n for n, f in features.items() if isinstance(f, datasets.ClassLabel)]
    found = found or [n for n in features if n in _LABEL_NAMES]
    return _only(found, features, "label", _LABEL_NAMES, "name it, or set data.no_labels=true")


def _there(features: Mapping[str, Any], kind: str, name: str) -> Any:
    if name not in features:
        raise ConfigError(f"{_KEY}.{kind}", name, "no such column", nearest(name, features))
    return features[name]


def _only(
    found: Sequence[str], features: Mapping[str, Any], kind: str, usual: Sequence[str], remedy: str
) -> str:
    if len(found) > 1:
        found = [name for name in usual if name in found][:1] or found
    if len(found) != 1:
        problem = f"{'several columns' if found else 'no column'} of {kind}s"
        raise ConfigError(f"{_KEY}.{kind}", None, problem, f"{remedy}; {_columns(features)}")
    return found[0]


def _columns(features: Mapping[str, Any]) -> str:
    kinds = (
        f"{name} ({getattr(f, 'dtype', None) or type(f).__name__})"
        if type(f).__name__ == "Value"
        else f"{name} ({'struct' if isinstance(f, Mapping) else type(f).__name__})"
        for name, f in features.items()
    )
    return f"columns: {', '.join(kinds)}"


def _labels(rows: Any, column: str) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the classes, and the class of every row; a negative or missing label is -1."""
    feature = rows.features[column]
    values = rows.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    if hasattr(feature, "names"):
        plain = [-1 if v is None else v for v in values]
        return list(feature.names), np.array(plain, dtype=np.int64)
    if not all(v is None or isinstance(v, int | str) for v in values):
        raise ConfigError(
            f"{_KEY}.label", column, "neither whole numbers nor names", _columns(rows.features)
        )
    try:
        known = sorted({v for v in values if v is not None and (isinstance(v, str) or v >= 0)})
    except TypeError:
        raise ConfigError(
            f"{_KEY}.label", column, "both numbers and names", _columns(rows.features)
        ) from None
    place = {value: target for target, value in enumerate(known)}
    targets = np.array([place.get(v, -1) for v in values], dtype=np.int64)
    return [str(v) for v in known], targets
