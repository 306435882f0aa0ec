"""Checks other people's configs: they must not name code to run, read environment variables, or
expand to more values than fit in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import read_text

ALLOW_CODE_VARIABLE = "SOLO_EXT_ALLOW_CODE"
"""Environment variable; 1 allows the code that this module refuses."""
TARGET = "_target_"
"""Hydra's key for a Python object to call."""
_REMEDY = f"remove it, or set {ALLOW_CODE_VARIABLE}=1 if you trust whoever wrote the config"
_PLAIN = {"job", "output_subdir", "run", "sweep"}
"""Keys of ``hydra`` that name no code; some are in solo-learn's own configs."""
_MOST = 100_000
"""Most values that a file may have after its aliases are expanded; configs have hundreds."""


def refuse_targets(config: Mapping[str, Any]) -> None:
    """Refuses ``_target_`` at any depth: a library that is given the section might call it.

    Raises:
        ConfigError: there is a ``_target_``, and ``SOLO_EXT_ALLOW_CODE`` is not 1.

    >>> refuse_targets({"optimizer": {"_target_": "os.system"}})
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: optimizer._target_='os.system': a config names Python ...
    """
    if os.environ.get(ALLOW_CODE_VARIABLE) == "1":
        return
    for key, value in _entries(config):
        if key.rpartition(".")[2] == TARGET:
            raise ConfigError(key, value, "a config names Python to run", _REMEDY)


def refuse_interpolations(config: Mapping[str, Any]) -> None:
    """Refuses ``${...}`` that is left in a config after interpolations were resolved.

    Hydra has already resolved those of the user's own config. Any that are left come from a run's
    file, whose author could use them to write the reader's environment variables into records.

    Raises:
        ConfigError: there is an interpolation.

    >>> refuse_interpolations({"name": "${oc.env:HOME}"})
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: name=...: an interpolation, which is not resolved here; ...
    """
    for key, value in _entries(config):
        if isinstance(value, str) and "${" in value:
            problem = "an interpolation, which is not resolved here"
            raise ConfigError(key, value, problem, "write the value itself")


def refuse_hydra_section(config: Any) -> None:
    """Refuses a section ``hydra`` that could make Hydra import or call Python.

    ``hydra.searchpath: [pkg://package]`` imports the package before the config is checked.

    Raises:
        ConfigError: the section has other keys than ``job``, ``output_subdir``, ``run``,
            ``sweep``, and ``SOLO_EXT_ALLOW_CODE`` is not 1.

    >>> refuse_hydra_section({"hydra": {"searchpath": ["pkg://unknown"]}})
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: hydra.searchpath=['pkg://unknown']: settings of Hydra ...
    """
    section = config.get("hydra") if isinstance(config, dict) else None
    if section is None or os.environ.get(ALLOW_CODE_VARIABLE) == "1":
        return
    problem = "settings of Hydra can name Python to run"
    if not isinstance(section, dict):
        raise ConfigError("hydra", section, problem, _REMEDY)
    for key, value in section.items():
        if key not in _PLAIN:
            raise ConfigError(f"hydra.{key}", value, problem, _REMEDY)


def _entries(node: Any) -> Iterator[tuple[str, Any]]:
    # Do not recurse: the author of a config could nest it deeper than Python's recursion limit.
    waiting: list[tuple[str, Any]] = [("", node)]
    seen: set[int] = set()
    while waiting:
        path, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, list | tuple):
            held = dict(enumerate(held))
        if not isinstance(held, Mapping):
            continue
        for key, value in held.items():
            dotted = f"{path}.{key}" if path else str(key)
            yield dotted, value
            waiting.append((dotted, value))


def read_yaml(file: Path) -> Any:
    """Reads a YAML file without running code that its tags name.

    Raises:
        UserError: the file cannot be read, is not YAML, or its aliases (``*name``) form a circle or
            turn a few lines into millions of values.
        FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "config.yaml"
    >>> _ = file.write_text("optimizer: {lr: 0.1}")
    >>> read_yaml(file)
    {'optimizer': {'lr': 0.1}}
    """
    content = read_text(file)
    check_yaml(content, file)
    with _errors_of_yaml(file):
        return yaml.safe_load(content)


def check_yaml(content: str, file: Path) -> None:
    """Refuses invalid YAML, and aliases that form a circle or stand for millions of values.

    Raises:
        UserError: ``content`` is invalid or has such aliases.

    >>> check_yaml("a: &a [*a]", Path("config.yaml"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: config.yaml: its aliases (*name) lead in a circle or ...
    """
    with _errors_of_yaml(file):
        root = yaml.compose(content, Loader=yaml.SafeLoader)
        count = 0 if root is None else _expanded(root, {})
    if count > _MOST:
        raise UserError(
            f"{file}: its aliases (*name) lead in a circle or stand for more than {_MOST} values; "
            "write them out"
        )


@contextlib.contextmanager
def _errors_of_yaml(file: Path) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; write it flatter") from None
    except Exception as error:
        # PyYAML raises many types of error, such as KeyError for `!!bool x`.
        raise UserError(f"{file}: not YAML: {str(error) or type(error).__name__}") from None


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of nodes with every alias expanded; above :data:`_MOST` if aliases form a circle."""
    if id(node) in known:
        return known[id(node)]
    # Set this before visiting the children: a node that is its own descendant is in a circle.
    known[id(node)] = _MOST + 1
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_expanded(inner, known) for inner in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_expanded(k, known) + _expanded(v, known) for k, v in node.value)
    known[id(node)] = total
    return total
