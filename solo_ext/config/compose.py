"""Composes a config from YAML files and overrides, with Hydra."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from solo_ext.config.schema import RunConfig
from solo_ext.config.untrusted import check_yaml, refuse_hydra_section
from solo_ext.core.errors import ConfigError, UserError, first_line, suggest_name
from solo_ext.core.files import config_root, is_file, read_text

_NAMESPACE = "solo_ext"


def shipped_configs() -> list[str]:
    """Names of the shipped pretraining configs, ``<dataset>/<method>``.

    >>> "digits/pcl" in shipped_configs()
    True
    """
    root = config_root() / _NAMESPACE
    found = (p.relative_to(root).with_suffix("") for p in root.glob("*/*.yaml"))
    helpers = {"augmentations", "base", "benchmark", "eval", "linear", "teachers"}
    return sorted(p.as_posix() for p in found if p.parts[0] not in helpers)


def compose(
    config_name: str, overrides: Sequence[str] = (), config_path: Path | None = None
) -> dict[str, Any]:
    """Composes a config and applies overrides.

    Args:
        config_name: name of a shipped config such as ``digits/debiased``, or of a file in
            ``config_path`` if that is given; or the path of a YAML file.
        overrides: ``key=value`` in Hydra's grammar. Keys of the schema need no ``+``.
        config_path: folder of the user's own configs; their defaults lists can name the shipped
            ones as ``/solo_ext/...``.

    Returns:
        A plain mapping with interpolations resolved.

    Raises:
        ConfigError: there is no such config, or it names code to run.
        UserError: ``config_path`` is no folder, or an override or YAML file cannot be read.

    >>> config = compose("digits/debiased", ["max_epochs=2", "method_kwargs.temperature=0.1"])
    >>> config["method"], config["max_epochs"], config["method_kwargs"]["temperature"]
    ('debiased', 2, 0.1)
    """
    if config_path is None and config_name.endswith((".yaml", ".yml")):
        path = Path(config_name).expanduser()
        if is_file(path):
            config_path, config_name = path.parent, path.name
    name = config_name.removesuffix(".yaml")
    suffix = "" if name.endswith(".yml") else ".yaml"
    if config_path is None:
        root, full = config_root(), f"{_NAMESPACE}/{name.removeprefix(_NAMESPACE + '/')}"
    else:
        root, full = config_path.expanduser().resolve(), name
        if not root.is_dir():
            raise UserError(
                f"--config-path {config_path}: no such folder; give a folder of YAML files"
            )
    file = root / f"{full}{suffix}"
    if not is_file(file):
        if config_path is None:
            known = shipped_configs()
        else:
            # Search only now: data may lie beside the configs.
            found = root.rglob("*.y*ml")
            known = [p.relative_to(root).as_posix().removesuffix(".yaml") for p in found]
        raise ConfigError("--config-name", config_name, "no such config", suggest_name(name, known))
    parsed = parse(overrides)
    # Hydra applies the overrides of config groups; `apply_overrides` sets values afterwards.
    groups = [o for o in parsed if _is_of_group(o, root)]
    cfg = _composed(root, full, groups)
    OmegaConf.set_struct(cfg, False)
    apply_overrides(cfg, [o for o in parsed if o not in groups])
    folder = full.partition("/")[0] if config_path is not None and "/" in full else None
    if folder in cfg and folder not in RunConfig.model_fields:
        raise UserError(
            f"--config-name {config_name}: a config in a folder needs the first line "
            f"`# @package _global_`, or its keys land under {folder!r}"
        )
    return _resolved(cfg)


def _is_of_group(override: Override, root: Path) -> bool:
    """Whether an override chooses a file of a config group, as ``augmentations=symmetric`` may."""
    group, value = override.key_or_group, override.value()
    if "/" in group or override.package is not None:
        return True
    folder = root / group
    return (
        isinstance(value, str)
        and folder.is_dir()
        and (folder / f"{value.removesuffix('.yaml')}.yaml").is_file()
    )


def _composed(root: Path, name: str, groups: Sequence[Override]) -> DictConfig:
    # One of solo-learn's configs ends in .yml, which Hydra reads only up to version_base 1.1.
    version = "1.1" if name.endswith(".yml") else "1.2"
    try:
        with warnings.catch_warnings():
            # Hide, among others, the warning about a missing `_self_`: without it, a config's own
            # keys override its defaults list, as users expect.
            for message in ("Defaults list is missing", 'version_base="1.1"', "Support for .yml"):
                warnings.filterwarnings("ignore", f"(?s).*{message}")
            with _files_checked(), initialize_config_dir(str(root), version_base=version):
                return hydra_compose(name, overrides=[o.input_line or "" for o in groups])
    except UserError:
        raise
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file or name)
        options = [str(o) for o in error.options or ()]
        remedy = (
            suggest_name(Path(missing).name, options) if options else "no such group of configs"
        )
        raise UserError(f"config {missing!r} is not there; {remedy}") from error
    except HydraException as error:
        dotted = [o.key_or_group.replace("/", ".") for o in groups]
        remedy = f"; values are written with dots: {dotted[0]}=..." if dotted else ""
        raise UserError(f"config {name!r} cannot be composed: {_text(error)}{remedy}") from error
    except Exception as error:
        # For odd values YAML and Hydra raise many types of error, even AttributeError.
        raise UserError(f"config {name!r} cannot be read: {_text(error)}") from error


class _CheckedFiles(FileConfigSource):
    """Hydra's reader of config files, which first checks that each file is harmless."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        with contextlib.suppress(FileNotFoundError):
            check_yaml(read_text(file), file)
        found = super().load_config(config_path)
        if isinstance(found.config, DictConfig):
            # Leave interpolations unresolved: one in place of the section is refused as well.
            refuse_hydra_section(OmegaConf.to_container(found.config))
        return found


@contextlib.contextmanager
def _files_checked() -> Iterator[None]:
    Plugins.instance()
    known, scheme = SourcesRegistry.instance().types, FileConfigSource.scheme()
    before = known[scheme]
    known[scheme] = _CheckedFiles
    try:
        yield
    finally:
        known[scheme] = before


def _resolved(cfg: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        parent, _, last = key.rpartition(".")
        with contextlib.suppress(OmegaConfBaseException):
            node = OmegaConf.select(cfg, parent) if parent else cfg
            held = node._get_node(last) if isinstance(node, DictConfig) else None
            value = held._value() if held is not None else None
            remedy = "write a value, or one that can be resolved"
            raise ConfigError(key, value, first_line(error), remedy) from error
        raise UserError(f"{key}: {_text(error)}") from error
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides ``key=value``; ``~/`` at the start of a value means the home folder.

    Raises:
        UserError: an override does not have this form.

    >>> [(o.key_or_group, o.value()) for o in parse(["optimizer.lr=0.1", "data.val_path=null"])]
    [('optimizer.lr', 0.1), ('data.val_path', None)]
    >>> parse(["optimizer.lr"])
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: override 'optimizer.lr' cannot be read: write ...
    """
    parts = [word.partition("=") for word in overrides]
    words = [
        key + sign + (os.path.expanduser(value) if value.startswith("~/") else value)
        for key, sign, value in parts
    ]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides=words)
    except OverrideParseException as error:
        raise _unreadable(error.override) from None
    for override in parsed:
        if not override.key_or_group:
            raise _unreadable(override.input_line)
    return list(parsed)


def _unreadable(word: str | None) -> UserError:
    return UserError(
        f"override {word!r} cannot be read: write key=value, an entry of a list as "
        "augmentations.0.crop_size=32, and quote values with commas or equals signs"
    )


def apply_overrides(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Sets or deletes the values that the overrides name, in place.

    Raises:
        UserError: an override has several values, or names an entry that a list does not have.

    >>> config = OmegaConf.create({"optimizer": {"lr": 0.3, "name": "sgd"}})
    >>> apply_overrides(config, parse(["optimizer.lr=0.1", "~optimizer.name"]))
    >>> config
    {'optimizer': {'lr': 0.1}}
    """
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override():
            raise UserError(
                f"override {override.input_line!r} names several values; quote a list as key=[a,b]"
            )
        try:
            if override.is_delete():
                _delete(cfg, key, override.value())
            else:
                OmegaConf.update(cfg, key, override.value(), force_add=True, merge=True)
        except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"override {override.input_line!r} cannot be applied: {_text(error)}"
            ) from error


def _delete(cfg: DictConfig, key: str, value: Any) -> None:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    place: Any = int(last) if isinstance(node, ListConfig) else last
    if not isinstance(node, ListConfig) and (not isinstance(node, DictConfig) or last not in node):
        valid = [str(k) for k in node] if isinstance(node, DictConfig) else []
        raise ConfigError(
            key, None, "cannot be deleted: it is not there", suggest_name(last, valid)
        )
    if value is not None and (held := node[place]) != value:
        raise ConfigError(key, held, f"is not {value!r}", f"write ~{key} to delete it")
    del node[place]


def _text(error: Exception) -> str:
    """The message of an error without the lines that name OmegaConf's types."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [n for n in lines if n and not n.startswith(("full_key:", "object_type="))]
    cause = error.__cause__ or error.__context__
    if not kept and isinstance(cause, Exception):
        return _text(cause)
    return " ".join(kept) or type(error).__name__
