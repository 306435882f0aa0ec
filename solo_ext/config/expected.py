"""What a field of a config takes, in words, from its annotation."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def expected(annotation: Any) -> str:
    """Says what a value of ``annotation`` looks like in YAML.

    Args:
        annotation: a type of :mod:`solo_ext.config.types`, a section, or a union of such.

    Returns:
        For example ``an integer above 0`` or ``a list, each a number from 0 to 1``.
    """
    bare, bounds = unwrapped(annotation)
    described = next((b.description for b in bounds if isinstance(b, FieldInfo)), None)
    if described:
        return described
    choices = literal_choices(bare)
    if choices is not None:
        return " or ".join(choices)
    members = union_members(bare)
    if members:
        return ", or ".join(dict.fromkeys(expected(m) for m in members))
    origin = get_origin(bare) or bare
    if origin is list:
        inner = get_args(bare)
        each = f", each {expected(inner[0])}" if inner and inner[0] is not Any else ""
        return f"a list{_length(bounds)}{each}"
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return f"a mapping with the keys {', '.join(sorted(origin.model_fields))}"
    if origin is dict:
        return "a mapping"
    return _NAMES.get(origin, "a value") + _range(bounds)


def literal_choices(annotation: Any) -> list[str] | None:
    """The values of an annotation that is nothing but literals and null, else ``None``."""
    bare, _ = unwrapped(annotation)
    members = [unwrapped(m)[0] for m in union_members(bare) or (bare,)]
    literals = [m for m in members if get_origin(m) is Literal]
    null = ["null"] if type(None) in members else []
    if not literals or len(literals) + len(null) < len(members):
        return None
    return list(dict.fromkeys([str(v) for m in literals for v in get_args(m)] + null))


def unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    """An annotation without ``Annotated``, and the constraints it carried."""
    bounds: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        for entry in metadata:
            bounds += [entry, *getattr(entry, "metadata", ())]
    return annotation, bounds


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, empty for anything else."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return ()


def _range(bounds: Sequence[Any]) -> str:
    low = next((b for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b for b in bounds if isinstance(b, Le | Lt)), None)
    words = {
        Ge: lambda b: f"of {b.ge} or more",
        Gt: lambda b: f"above {b.gt}",
        Le: lambda b: f"up to {b.le}",
        Lt: lambda b: f"below {b.lt}",
    }
    if isinstance(low, Ge) and isinstance(high, Le):
        return f" from {low.ge} to {high.le}"
    found = ", ".join(words[type(b)](b) for b in (low, high) if b is not None)
    return f" {found}" if found else ""


def _length(bounds: Sequence[Any]) -> str:
    low = next((b.min_length for b in bounds if isinstance(b, MinLen)), 0)
    high = next((b.max_length for b in bounds if isinstance(b, MaxLen)), None)
    if high is not None and low == high:
        return f" of {low}"
    return f" of {low} or more" if low else ""
