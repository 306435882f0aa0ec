"""The interface to solo-learn, and the only place that knows which generation is installed.

``BaseMethod`` and ``BaseMomentumMethod`` have the interface of solo-learn's main branch on both
generations; accessing either loads the host. `patches` lists what is replaced in an installed
solo-learn, `backbones` adds timm's models to solo-learn's table, `dali_loader` and `dali_main`
read images through its DALI pipelines. `release_1_0_2` implements what the release lacks of main's
interface, and nothing outside it depends on the release.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from solo_ext.core.errors import UserError

if TYPE_CHECKING:
    from solo_ext.host.release_1_0_2.base import BaseMethod, BaseMomentumMethod

    initialize_momentum_params: Any

__all__ = ["BaseMethod", "BaseMomentumMethod", "Host", "HostInfo", "detect", "load"]


INSTALL = (
    "install the release with `pip install --no-deps solo-learn==1.0.2` (or `uv sync`), or take "
    "the main branch: `git clone https://github.com/vturrisi/solo-learn` and put the checkout on "
    "PYTHONPATH (`export PYTHONPATH=/path/to/solo-learn`)"
)


@dataclass(frozen=True)
class HostInfo:
    """An installed solo-learn.

    Attributes:
        version: the version that it states; every commit of main states 1.0.6.
        path: folder of the package ``solo``.
        fingerprint: first 12 hex digits of the SHA-256 of its Python files.

    >>> HostInfo("main", version="1.0.6", path=Path("solo"), fingerprint="0123456789ab").generation
    'main'
    """

    generation: Literal["main", "1.0.2"]
    version: str
    path: Path
    fingerprint: str


@dataclass(frozen=True)
class Host:
    """A loaded host.

    Attributes:
        methods: ``solo.methods.METHODS``, name to class; every class takes main's config.
        backbones: constructors by name, including ``timm/<model>``.
        solo: the module ``solo``.

    >>> "timm/resnet10t" in load().backbones
    True
    """

    info: HostInfo
    methods: dict[str, type]
    backbones: dict[str, Any]
    solo: Any


def detect() -> HostInfo:
    """Finds solo-learn, and recognises its generation by its files.

    Raises:
        UserError: solo-learn is not installed, or is of neither generation.

    >>> detect().generation in ("main", "1.0.2")
    True
    """
    spec = importlib.util.find_spec("solo")
    if spec is None or spec.origin is None:
        raise UserError(f"solo-learn is not installed; {INSTALL}")
    path = Path(spec.origin).resolve().parent
    if (path / "backbones").is_dir() and (path / "data").is_dir():
        return HostInfo("main", "1.0.6", path, fingerprint(path))
    if (path / "utils" / "backbones.py").is_file():
        return HostInfo("1.0.2", "1.0.2", path, fingerprint(path))
    raise UserError(f"the package `solo` in {path} is no solo-learn that solo_ext knows; {INSTALL}")


def fingerprint(package: Path) -> str:
    """Digest of a package's Python files: names and contents, in sorted order.

    >>> len(fingerprint(detect().path))
    12
    """
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


_loaded: Host | None = None


def load() -> Host:
    """Imports the installed solo-learn once, and applies the patches that change no results.

    Raises:
        UserError: solo-learn is not installed, or cannot be imported.

    >>> "simclr" in load().methods
    True
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    info = detect()
    try:
        with _timm_registry_kept():
            if info.generation == "1.0.2":
                solo = import_module("solo_ext.host.release_1_0_2").load()
            else:
                solo = import_module("solo")
                loaders = ("data.pretrain_dataloader", "data.classification_dataloader")
                for name in ("methods", "losses", *loaders):
                    import_module(f"solo.{name}")
    except ImportError as error:
        raise UserError(
            f"solo-learn ({info.generation}) in {info.path} cannot be imported: {error}; install "
            "what is missing, `solo-ext doctor` lists it"
        ) from error
    from solo_ext.host.patches import apply_all

    apply_all()
    backbones = solo.methods.base.BaseMethod._BACKBONES
    _loaded = Host(info, solo.methods.METHODS, backbones, solo)
    return _loaded


@contextlib.contextmanager
def _timm_registry_kept() -> Iterator[None]:
    """Restores timm's ConvNeXts and PoolFormers after main has overwritten them with its own."""
    from timm.models import _registry

    # These are the registries of models and of weights. New names that main adds stay in them.
    tables: list[Any] = [
        table
        for name, table in vars(_registry).items()
        if name.startswith("_model") and isinstance(table, dict | set)
    ]
    held = [copy.copy(table) for table in tables]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting .* in registry.*")
        warnings.filterwarnings("ignore", ".*custom_fwd.*")
        warnings.filterwarnings("ignore", "Importing from timm.*", FutureWarning)
        yield
    for table, own in zip(tables, held, strict=True):
        table.update(own)


def __getattr__(name: str) -> Any:
    if name in ("BaseMethod", "BaseMomentumMethod"):
        return getattr(load().solo.methods.base, name)
    if name == "initialize_momentum_params":
        return load().solo.utils.momentum.initialize_momentum_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
