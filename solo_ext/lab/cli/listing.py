"""Names and papers of all methods, read from files: to import them takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import solo_ext
from solo_ext.host import HostInfo

_BASES = {"base", "linear"}
"""Entries of solo-learn's table that train nothing by themselves."""


def listed_methods(host: HostInfo) -> list[dict[str, Any]]:
    """Rows of all methods that a config can select, in the order of their names.

    Where solo-learn has a method of the same name, the other one has its origin before its name.

    >>> from solo_ext.host import detect
    >>> rows = {row["name"]: row for row in listed_methods(detect())}
    >>> rows["debiased"]["arxiv"], rows["simclr"]["origin"]
    ('2007.00224', 'solo-learn')
    """
    files = sorted((Path(solo_ext.__file__).parent / "methods").glob("*.py"))
    registered = [call for file in files for call in _registered(file)]
    rows = [{"name": name, "origin": "solo_ext", **about} for name, about in registered]
    for point in entry_points(group="solo_ext.methods"):
        origin = point.dist.name if point.dist else point.module.partition(".")[0]
        rows.append({"name": point.name, "origin": origin})
    table = _keys_of(host.path / "methods" / "__init__.py", "METHODS")
    for row in rows:
        if row["name"] in table:
            row["name"] = f"{row['origin']}/{row['name']}"
    rows += [{"name": name, "origin": "solo-learn"} for name in table if name not in _BASES]
    empty = {"name": "", "origin": "", "paper": "", "year": "", "arxiv": ""}
    return sorted((empty | row for row in rows), key=lambda row: str(row["name"]))


def _registered(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and further arguments of every ``METHODS.register(...)`` in a file."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "METHODS.register":
            given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            yield ast.literal_eval(node.args[0]), given


def _keys_of(file: Path, table: str) -> list[str]:
    """Keys of the mapping that a file assigns to a name."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    return []
