"""Composing a config from YAML files and overrides, with Hydra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from solo_ext.errors import ConfigError, UserError, nearest
from solo_ext.paths import config_root

NAMESPACE = "solo_ext"


def shipped_configs() -> list[str]:
    """Names of the shipped pretraining configs, ``<dataset>/<method>``."""
    root = config_root() / NAMESPACE
    found = (p.relative_to(root).with_suffix("") for p in root.glob("*/*.yaml"))
    helpers = {"augmentations", "base", "benchmark", "eval", "linear"}
    return sorted(p.as_posix() for p in found if p.parts[0] not in helpers)


def compose(
    config_name: str, overrides: Sequence[str] = (), config_path: Path | None = None
) -> dict[str, Any]:
    """Composes a config and applies overrides.

    Args:
        config_name: name of a shipped config such as ``digits/debiased``; of a file in
            ``config_path`` where that is given.
        overrides: ``key=value`` in Hydra's grammar. Keys that the schema knows need no ``+``.
        config_path: folder of the user's own configs; the shipped ones can be named in their
            defaults lists as ``/solo_ext/...``.

    Returns:
        A plain mapping, interpolations resolved.

    Raises:
        ConfigError: no such config.
        UserError: a folder that is not one, an override or a YAML file that cannot be read.
    """
    name = config_name.removesuffix(".yaml")
    if config_path is None:
        root, full = config_root(), f"{NAMESPACE}/{name.removeprefix(NAMESPACE + '/')}"
        known = shipped_configs()
    else:
        root, full = config_path.expanduser().resolve(), name
        if not root.is_dir():
            raise UserError(
                f"--config-path {config_path}: no such folder; give a folder of YAML files"
            )
        known = [p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml")]
    if not (root / f"{full}.yaml").is_file():
        raise ConfigError("--config-name", config_name, "no such config", nearest(name, known))
    groups, values = _split(parse(overrides))
    try:
        with initialize_config_dir(config_dir=str(root), version_base="1.2"):
            cfg = hydra_compose(full, overrides=[o.input_line or "" for o in groups])
        OmegaConf.set_struct(cfg, False)
        apply_overrides(cfg, values)
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _readable(error) from error
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items() if k != "hydra"}


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses ``key=value`` words.

    Raises:
        UserError: a word that is none.
    """
    try:
        return list(OverridesParser.create().parse_overrides(overrides=list(overrides)))
    except OverrideParseException as error:
        raise UserError(
            f"override {error.override!r} cannot be read: write key=value, quote values with "
            "commas or equals signs"
        ) from None


def apply_overrides(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Sets or deletes the values in place."""
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override():
            raise UserError(
                f"override {override.input_line!r} names several values; quote a list as key=[a,b]"
            )
        if override.is_delete():
            parent, _, last = key.rpartition(".")
            node = OmegaConf.select(cfg, parent) if parent else cfg
            if node is None or last not in node:
                raise ConfigError(key, None, "cannot be deleted: it is not there")
            del node[last]
        else:
            OmegaConf.update(cfg, key, override.value(), force_add=True, merge=True)


def _split(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Overrides of config groups are Hydra's; values are set afterwards."""
    groups = [o for o in overrides if "/" in o.key_or_group or o.package is not None]
    return groups, [o for o in overrides if o not in groups]


def _readable(error: Exception) -> UserError:
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or ["?"]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        options = error.options or []
        return UserError(
            f"config {error.missing_cfg_file!r} is not there; "
            + nearest(str(error.missing_cfg_file), options)
        )
    key = next((m.group(1) for line in rest if (m := re.match(r"full_key: (\S+)", line))), None)
    if key:
        return ConfigError(key, None, first, "give it a value")
    return UserError(first)
