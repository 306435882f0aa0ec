"""Configs that name code to run, or what is not theirs to read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext.core.errors import ConfigError

ALLOW = "SOLO_EXT_ALLOW_CODE"
"""Environment variable; 1 takes what this module refuses."""
TARGET = "_target_"
"""Hydra's key for a Python object to call."""
_REMEDY = f"remove it, or set {ALLOW}=1 if you trust whoever wrote the config"
_PLAIN = {"job", "output_subdir", "run", "sweep"}
"""Keys of ``hydra`` that name no code; solo-learn's own configs have some of them."""


def refuse_targets(config: Mapping[str, Any]) -> None:
    """Refuses ``_target_`` wherever it stands; nothing here calls it, what gets it might.

    Args:
        config: plain mapping.

    Raises:
        ConfigError: there is one, and ``SOLO_EXT_ALLOW_CODE`` is not 1.
    """
    if os.environ.get(ALLOW) == "1":
        return
    for key, value in _entries(config):
        if key.rpartition(".")[2] == TARGET:
            raise ConfigError(key, value, "a config names Python to run", _REMEDY)


def refuse_interpolations(config: Mapping[str, Any]) -> None:
    """Refuses ``${...}`` in a config whose interpolations are resolved.

    Those of the user's own config are by now. What is left comes from the file of a run, whose
    author would choose which environment variable goes into records.

    Args:
        config: plain mapping.

    Raises:
        ConfigError: there is one.
    """
    for key, value in _entries(config):
        if isinstance(value, str) and "${" in value:
            raise ConfigError(
                key, value, "an interpolation, which is not resolved here", "write the value itself"
            )


def refuse_hydra_section(file: Path) -> None:
    """Refuses a section ``hydra`` of a YAML file that could make Hydra import or call Python.

    ``hydra.searchpath: [pkg://package]`` imports the package before anything of the config is
    looked at. A file that cannot be read is left for Hydra to complain of.

    Args:
        file: a config that is to be composed.

    Raises:
        ConfigError: the section has other keys than ``job``, ``output_subdir``, ``run``,
            ``sweep``, and ``SOLO_EXT_ALLOW_CODE`` is not 1.
    """
    if os.environ.get(ALLOW) == "1":
        return
    try:
        config = OmegaConf.load(file)
    except Exception:
        # In whichever of YAML's ways; Hydra reads the same file and fails alike.
        return
    if not isinstance(config, DictConfig) or "hydra" not in config:
        return
    # Unresolved: an interpolation for the whole section is refused too.
    section = OmegaConf.to_container(config)["hydra"]  # type: ignore[index, call-overload]
    if section is None:
        return
    if not isinstance(section, dict):
        raise ConfigError("hydra", section, "settings of Hydra can name Python to run", _REMEDY)
    for key, value in section.items():
        if key not in _PLAIN:
            problem = "settings of Hydra can name Python to run"
            raise ConfigError(f"hydra.{key}", value, problem, _REMEDY)


def _entries(node: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a config under its dotted key, sections and lists among them."""
    # Without recursion: how deep a config is, its author decides.
    waiting: list[tuple[str, Any]] = [("", node)]
    seen: set[int] = set()
    while waiting:
        path, held = waiting.pop()
        if id(held) in seen:
            continue
        if isinstance(held, Mapping):
            entries = [(str(k), v) for k, v in held.items()]
        elif isinstance(held, list | tuple):
            entries = [(str(i), v) for i, v in enumerate(held)]
        else:
            continue
        seen.add(id(held))
        for key, value in entries:
            dotted = f"{path}.{key}" if path else key
            yield dotted, value
            waiting.append((dotted, value))
