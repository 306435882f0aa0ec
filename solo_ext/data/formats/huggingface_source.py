"""Where the rows of `data.format: huggingface` come from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from solo_ext.core.errors import ConfigError, nearest

_KEY = "data.huggingface"
_VALIDATION = ("validation", "valid", "val", "dev", "test")
"""Names that a split for validation has, the first of them that is there."""
_FILES = (".parquet", ".arrow")


def load_split(
    path: str, split: str, settings: Mapping[str, Any], *, same_path: bool = False
) -> tuple[Any, str]:
    """One split of a data set, its table memory-mapped.

    Args:
        path: a folder that ``save_to_disk`` wrote, another folder that `datasets` reads (images,
            parquet), a ``.parquet`` file or a pattern of them, an ``.arrow`` file, or the name of a
            data set on the hub.
        split: ``train`` or ``val``.
        settings: ``name`` and ``revision`` on the hub, ``cache_dir``, ``train_split``,
            ``val_split``.
        same_path: training and validation are of one path.

    Returns:
        A ``datasets.Dataset``, and the name of its split.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such data set or split.
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
    with _quiet(datasets):
        loaded = _load(datasets, path, f"data.{split}_path", settings)
    wanted = settings.get(f"{split}_split")
    if isinstance(loaded, datasets.Dataset):
        # One of `save_to_disk` or an arrow file; the split it was cut from is a hint at most.
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


def _load(datasets: Any, path: str, key: str, settings: Mapping[str, Any]) -> Any:
    place = Path(path).expanduser()
    kept = {"cache_dir": settings.get("cache_dir")}
    try:
        if any((place / f).is_file() for f in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(place))
        if place.is_dir():
            return datasets.load_dataset(str(place), settings.get("name"), **kept)
        if place.suffix == ".arrow" and place.is_file():
            return datasets.Dataset.from_file(str(place))
        if place.suffix == ".parquet" and any(place.parent.glob(place.name)):
            return datasets.load_dataset("parquet", data_files=str(place), **kept)
        if not _may_be_a_name(path):
            remedy = "give a folder, a .parquet or .arrow file, or a name on the hub"
            raise ConfigError(key, path, "no such folder or file", remedy)
        of_hub = {"revision": settings.get("revision"), **kept}
        return datasets.load_dataset(path, settings.get("name"), **of_hub)
    except ConfigError:
        raise
    except Exception as error:
        # Missing, private, gated, offline, torn, of another format: each has a type of its own.
        told = error.__cause__ if "while generating" in str(error) else error
        said = (str(told or error).strip() or type(error).__name__).splitlines()[0]
        problem = said if place.exists() or place.suffix in _FILES else f"not here, and {said}"
        raise ConfigError(
            key, path, problem, "give what `datasets.load_dataset` or `load_from_disk` takes"
        ) from None


def _may_be_a_name(path: str) -> bool:
    """Whether this can be ``<data set>`` or ``<owner>/<data set>``."""
    outside = path.startswith(("/", ".", "~")) or path.endswith(_FILES)
    return not outside and path.count("/") <= 1 and "\\" not in path


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars where nobody watches, and no second account of an error."""
    held = datasets.logging.get_verbosity()
    bars = datasets.is_progress_bar_enabled() and not sys.stderr.isatty()
    # What the hub's client says of its attempts is another logger's.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(held)
        if bars:
            datasets.enable_progress_bars()
