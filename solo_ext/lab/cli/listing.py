"""Names and papers of methods and losses, read from files: to import them takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import solo_ext
from solo_ext.host import HostInfo
from solo_ext.host.names import table_keys

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
    rows = _of_plugins("methods")
    table = table_keys(host.path / "methods" / "__init__.py", "METHODS")
    for row in rows:
        if row["name"] in table:
            row["name"] = f"{row['origin']}/{row['name']}"
    rows += [{"name": name, "origin": "solo-learn"} for name in table if name not in _BASES]
    return _in_order(rows)


def listed_losses() -> list[dict[str, Any]]:
    """Rows of the functions in ``solo_ext.losses`` and of other packages' losses, by name.

    >>> rows = {row["name"]: row for row in listed_losses()}
    >>> rows["debiased_loss_func"]["year"]
    2020
    """
    return _in_order(_of_plugins("losses"))


def losses_of_metric() -> list[str]:
    """Names of the losses that the method ``metric`` trains, without those of other packages.

    >>> "mochi_loss_func" in losses_of_metric(), "triplet_loss_func" in losses_of_metric()
    (False, True)
    """
    file = Path(solo_ext.__file__).parent / "methods" / "metric_criteria.py"
    calls = (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call))
    return [
        ast.literal_eval(name)
        for call in calls
        if ast.unparse(call.func) == "trains"
        for name in call.args
    ]


def _of_plugins(kind: str) -> list[dict[str, Any]]:
    """Rows of what is registered in ``solo_ext/<kind>``, and of other packages' entry points."""
    files = sorted((Path(solo_ext.__file__).parent / kind).glob("*.py"))
    rows = [row for file in files for row in _registered(file, f"{kind.upper()}.register")]
    for point in entry_points(group=f"solo_ext.{kind}"):
        origin = point.dist.name if point.dist else point.module.partition(".")[0]
        rows.append({"name": point.name, "origin": origin})
    return rows


def _registered(file: Path, register: str) -> Iterator[dict[str, Any]]:
    """Arguments of every call of a registry's ``register`` in a file."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == register:
            about = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            yield {"name": ast.literal_eval(node.args[0]), "origin": "solo_ext", **about}


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    empty = {"name": "", "origin": "", "paper": "", "year": "", "arxiv": ""}
    return sorted((empty | row for row in rows), key=lambda row: str(row["name"]))
