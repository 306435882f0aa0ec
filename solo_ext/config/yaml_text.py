"""Reading YAML that somebody else wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from solo_ext.core.errors import UserError

_MOST = 100_000
"""Values that a file may stand for once its aliases are written out; configs have hundreds."""


def read_yaml(file: Path) -> Any:
    """Reads a YAML file; no tag in it makes Python call anything.

    Raises:
        UserError: it is no YAML, or its aliases stand for more than a config can hold.
        OSError: it cannot be read.
    """
    content = file.read_bytes()
    check_aliases(content, file)
    try:
        return yaml.safe_load(content)
    except Exception as error:
        # PyYAML answers to odd values in many ways: KeyError for `!!bool x`.
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{file}: not YAML: {reason or type(error).__name__}") from None


def check_aliases(content: bytes, file: Path) -> None:
    """Refuses aliases that lead in a circle, or stand for millions of values in a few lines.

    A file that is no YAML passes, for whoever reads it to complain of.

    Args:
        content: of the file.
        file: for the message.

    Raises:
        UserError: there are such aliases.
    """
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except Exception:
        return
    try:
        count = 0 if root is None else _expanded(root, {})
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; write it flatter") from None
    if count > _MOST:
        raise UserError(
            f"{file}: its aliases (*name) lead in a circle or stand for more than {_MOST} values; "
            "write them out"
        )


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of nodes with every alias written out; above :data:`_MOST` in a circle."""
    if id(node) in known:
        return known[id(node)]
    # What is met again below itself is a circle.
    known[id(node)] = _MOST + 1
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_expanded(inner, known) for inner in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_expanded(k, known) + _expanded(v, known) for k, v in node.value)
    known[id(node)] = total
    return total
