"""Checking a config against the schema: one line for the first mistake."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from solo_ext.config.schema import Run, Section
from solo_ext.errors import ConfigError, nearest


def trainer_arguments() -> tuple[str, ...]:
    """Names of the arguments of Lightning's ``Trainer`` that a config may set."""
    from lightning.pytorch import Trainer

    ours = {"self", "logger", "callbacks", "default_root_dir", "enable_checkpointing"}
    return tuple(n for n in inspect.signature(Trainer.__init__).parameters if n not in ours)


def check_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a composed config and fills in its defaults.

    Args:
        config: plain mapping, interpolations resolved.

    Returns:
        The config with every default of the schema written out; arguments of the Trainer
        that the schema does not name are passed through.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type or range.
    """
    trainer = set(trainer_arguments())
    extra = {k: v for k, v in config.items() if k in trainer and k not in Run.model_fields}
    known = {k: v for k, v in config.items() if k not in extra}
    run = validated(TypeAdapter(Run), known, valid_root=trainer)
    filled: dict[str, Any] = run.model_dump()
    return filled | extra


def check_method_kwargs(kwargs_type: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks ``method_kwargs`` against a method's dataclass and fills in its defaults.

    Raises:
        ConfigError: as :func:`check_run`.
    """
    value = validated(_model_of(kwargs_type), dict(given), prefix="method_kwargs")
    return value.model_dump()  # type: ignore[no-any-return]


@functools.cache
def _model_of(kwargs_type: type) -> TypeAdapter[Any]:
    """A strict pydantic model with the fields of a dataclass."""
    hints = get_type_hints(kwargs_type, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kwargs_type):
        if field.default_factory is not dataclasses.MISSING:
            default: Any = Field(default_factory=field.default_factory)
        else:
            default = ... if field.default is dataclasses.MISSING else field.default
        fields[field.name] = (hints[field.name], default)
    return TypeAdapter(create_model(kwargs_type.__name__, __base__=Section, **fields))


def validated(
    adapter: TypeAdapter[Any],
    given: Mapping[str, Any],
    *,
    prefix: str = "",
    valid_root: set[str] = frozenset(),  # type: ignore[assignment]
) -> Any:
    """Validates and turns pydantic's first complaint into one line.

    Raises:
        ConfigError: the first mistake in the order of the config.
    """
    try:
        return adapter.validate_python(dict(given))
    except ValidationError as error:
        raise _first_mistake(error, adapter, prefix, valid_root) from None


def _first_mistake(
    error: ValidationError, adapter: TypeAdapter[Any], prefix: str, valid_root: set[str]
) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key is both unknown and, under its right name, missing: the former says more.
    first = min(problems, key=lambda p: p["type"] != "extra_forbidden")
    path = tuple(p for p in first["loc"] if not _is_union_branch(p))
    key = ".".join(str(p) for p in ((prefix,) if prefix else ()) + path)
    if first["type"] == "extra_forbidden":
        valid = _fields_at(adapter, path[:-1]) | (valid_root if len(path) == 1 else set())
        return ConfigError(key, first["input"], "unknown key", nearest(str(path[-1]), valid))
    if first["type"] == "missing":
        return ConfigError(key, None, "this key is required", "give it a value")
    same = [p for p in problems if tuple(q for q in p["loc"] if not _is_union_branch(q)) == path]
    allowed = " or ".join(dict.fromkeys(_allowed(p) for p in same))
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        names = [
            n.strip(" '") for n in str(first["ctx"]["expected"]).replace(" or ", ",").split(",")
        ]
        return ConfigError(
            key, first["input"], "not a valid choice", nearest(first["input"], names)
        )
    return ConfigError(key, first["input"], "not a valid value", f"allowed: {allowed}")


def _is_union_branch(part: Any) -> bool:
    """pydantic names the tried branch of a union in the path; users know no such key."""
    text = str(part)
    return isinstance(part, str) and (
        text in {"int", "float", "str", "bool"} or "[" in text or "constrained" in text
    )


def _allowed(problem: Any) -> str:
    kind, ctx = problem["type"], problem.get("ctx", {})
    bounds = {
        "greater_than": "above {gt}",
        "greater_than_equal": "{ge} or more",
        "less_than": "below {lt}",
        "less_than_equal": "{le} or less",
        "too_short": "at least {min_length} entries",
        "too_long": "at most {max_length} entries",
        "literal_error": "{expected}",
    }
    if kind in bounds:
        return bounds[kind].format(**ctx)
    names = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "finite_number": "a finite number",
    }
    message: str = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return names.get(kind, message)


def _fields_at(adapter: TypeAdapter[Any], path: tuple[Any, ...]) -> set[str]:
    """Keys that are valid below ``path``."""
    node: Any = adapter._type
    for part in path:
        if isinstance(part, int):
            continue
        fields = getattr(node, "model_fields", {})
        node = _model_in(fields[part].annotation) if part in fields else None
    if node is None:
        return set()
    return set(node.model_fields)


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
