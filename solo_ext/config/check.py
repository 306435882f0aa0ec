"""Checks a config against the schema; the first mistake gives one line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from solo_ext.config.schema import TRAINER, RunConfig, Section
from solo_ext.config.untrusted import refuse_interpolations, refuse_targets
from solo_ext.core.errors import ConfigError, nearest

_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


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
        The config with every default of the schema written out; arguments of the Trainer that the
        schema does not name are passed through.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type or range; a
            ``_target_``, which names code; an interpolation.
    """
    run = run_config(config)
    passed = run.model_fields_set - RunConfig.model_fields.keys()
    return run.model_dump(include=RunConfig.model_fields.keys() | passed)


def run_config(config: Mapping[str, Any]) -> RunConfig:
    """The typed form of a composed config, with the Trainer's arguments as additional fields.

    Raises:
        ConfigError: as :func:`check_run`.
    """
    refuse_targets(config)
    refuse_interpolations(config)
    return validated(_run_model(), config)  # type: ignore[no-any-return]


def check_method_kwargs(kwargs_type: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks ``method_kwargs`` against the method's class of settings and fills in its defaults.

    The class is a :class:`Section`, or a dataclass with the decorator
    :func:`solo_ext.core.types.method_kwargs`. Its class attribute ``SYNONYMS``, if there is one,
    maps alternative keys to the keys that they stand for.

    Raises:
        ConfigError: as :func:`check_run`, or a key and its synonym have different values.

    >>> from solo_ext.core.types import method_kwargs
    >>> @method_kwargs
    ... class Kwargs:
    ...     temperature: float = 0.2
    >>> check_method_kwargs(Kwargs, {})
    {'temperature': 0.2}
    >>> check_method_kwargs(Kwargs, {"temperatur": 0.1})
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: method_kwargs.temperatur=0.1: unknown key; did you mean ...
    """
    named = _without_synonyms(given, getattr(kwargs_type, "SYNONYMS", {}))
    value = validated(_model_of(kwargs_type), named, prefix="method_kwargs")
    return value.model_dump()  # type: ignore[no-any-return]


def _without_synonyms(given: Mapping[str, Any], synonyms: Mapping[str, str]) -> dict[str, Any]:
    named = copy.deepcopy(dict(given))
    for synonym, key in synonyms.items():
        if synonym not in named:
            continue
        value = named.pop(synonym)
        *sections, name = key.split(".")
        place = named
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
        if not isinstance(place, dict):
            # A mapping is missing here; the validation that follows reports it.
            break
        held = place.get(name)
        if held not in (None, value):
            raise ConfigError(
                f"method_kwargs.{synonym}",
                value,
                f"here it is method_kwargs.{key}, which is {held}",
                "give one of them",
            )
        place[name] = value
    return named


@functools.cache
def _run_model() -> TypeAdapter[Any]:
    """:class:`RunConfig` and those arguments of the Trainer whose values YAML can express."""
    from lightning.pytorch import Trainer

    hints = {**get_type_hints(Trainer.__init__), **TRAINER}
    fields: dict[str, Any] = {
        name: (_of_yaml(hints[name]), None)
        for name in trainer_arguments()
        if name not in RunConfig.model_fields
    }
    precision = RunConfig.model_fields["precision"].default
    fields["precision"] = (_of_yaml(hints["precision"]), precision)
    return TypeAdapter(create_model("RunConfig", __base__=RunConfig, **fields))


def _of_yaml(hint: Any) -> Any:
    """The part of a type that plain values can have, ``None`` if there is none."""
    plain = [m for m in union_members(hint) or (hint,) if _is_plain(m)]
    return functools.reduce(operator.or_, plain) if plain else None


def _is_plain(hint: Any) -> bool:
    bare = unwrapped(hint)[0]
    if get_origin(bare) in (list, dict):
        return all(_is_plain(inner) for inner in get_args(bare))
    return get_origin(bare) is Literal or bare in (int, float, str, bool, type(None))


@functools.cache
def _model_of(kwargs_type: type) -> TypeAdapter[Any]:
    """Adapter for a :class:`Section`, or for the :func:`_section_of` a dataclass."""
    known = issubclass(kwargs_type, Section)
    return TypeAdapter(kwargs_type if known else _section_of(kwargs_type))


def _section_of(kwargs_type: type, preset: Any = None) -> type[Section]:
    """A strict pydantic model with the fields of a dataclass, and of dataclasses within it.

    Args:
        kwargs_type: the dataclass.
        preset: an instance whose values replace the dataclass's own defaults.
    """
    hints = get_type_hints(kwargs_type, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kwargs_type):
        hint = hints[field.name]
        held = field.default if preset is None else getattr(preset, field.name)
        if dataclasses.is_dataclass(hint):
            # Keys that a config leaves out of the section keep the preset's values.
            section = _section_of(cast(type, hint), held)
            fields[field.name] = (section, section())
            continue
        if preset is not None:
            default: Any = Field(default_factory=functools.partial(copy.copy, held))
        elif field.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=field.default_factory)
        elif field.default is dataclasses.MISSING:
            default = ...
        else:
            # Validate the default, so that 0 becomes 0.0 as it does for a 0 from YAML.
            default = Field(field.default, validate_default=True)
        fields[field.name] = (hint, default)
    return create_model(kwargs_type.__name__, __base__=Section, **fields)


def validated(adapter: TypeAdapter[Any], given: Mapping[str, Any], *, prefix: str = "") -> Any:
    """Validates a mapping, and turns pydantic's errors into one line.

    Args:
        adapter: adapter of a :class:`Section`.
        given: plain mapping.
        prefix: dotted key of the section, empty for the root.

    Raises:
        ConfigError: an unknown key if there is one, else the first mistake in schema order.
    """
    try:
        return adapter.validate_python(dict(given))
    except ValidationError as error:
        raise _first_mistake(error, adapter._type, prefix) from None


def _first_mistake(error: ValidationError, root: Any, prefix: str) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key is both unknown and missing under its right name; "unknown" says more.
    first = min(problems, key=lambda p: p["type"] not in ("extra_forbidden", "invalid_key"))
    kind, value, loc = first["type"], first["input"], first["loc"]
    if kind == "invalid_key" or (loc[-1:] == ("[key]",) and kind != "extra_forbidden"):
        # For a key that is no text, pydantic's input is the key, and the path ends in its type.
        path, _ = _located(root, loc[: -1 if kind == "invalid_key" else -2])
        return ConfigError(
            _dotted(prefix, path), value, "this key is no text", "keys are text: quote or remove it"
        )
    if kind == "extra_forbidden":
        path, node = _located(root, loc[:-1])
        key = _dotted(prefix, (*path, loc[-1]))
        return ConfigError(key, value, "unknown key", nearest(str(loc[-1]), _keys(node), show=20))
    path, annotation = _located(root, loc)
    key = _dotted(prefix, path)
    if kind == "missing":
        return ConfigError(key, None, "this key is required", f"allowed: {expected(annotation)}")
    choices = literal_choices(annotation)
    if choices is not None and isinstance(value, str | int | float):
        return ConfigError(key, value, "not a valid choice", nearest(str(value), choices, show=40))
    return ConfigError(key, value, "not a valid value", f"allowed: {expected(annotation)}")


def _dotted(prefix: str, path: tuple[Any, ...]) -> str:
    return ".".join(str(p) for p in ((prefix,) if prefix else ()) + path)


def _located(root: Any, loc: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """The keys of a location that pydantic names, and the annotation there.

    pydantic's locations also name the branch of a union that it tried, which is left out here.
    """
    path: list[Any] = []
    node, parts = root, list(loc)
    while parts:
        members = _members(node)
        if len(members) > 1:
            parts.pop(0)
            if not parts:
                break
        path.append(parts.pop(0))
        below = (_below(member, path[-1]) for member in members)
        node = next((b for b in below if b is not None), Any)
    return tuple(path), node


def _members(annotation: Any) -> list[Any]:
    """The branches of a union except null; for another annotation itself."""
    members = union_members(unwrapped(annotation)[0]) or (annotation,)
    return [m for m in members if m is not type(None)]


def _below(annotation: Any, part: Any) -> Any:
    """The annotation of a key or entry of a section, list or mapping; ``None`` if it has none."""
    bare = unwrapped(annotation)[0]
    if _is_section(bare):
        field = bare.model_fields.get(part)
        return None if field is None else Annotated[(field.annotation, *field.metadata, "")]
    inner = get_args(bare)
    origin = get_origin(bare)
    if origin is list and isinstance(part, int):
        return inner[0]
    return inner[1] if origin is dict else None


def _keys(annotation: Any) -> set[str]:
    """Keys that a section takes."""
    sections = (m for m in _members(annotation) if _is_section(unwrapped(m)[0]))
    return {key for section in sections for key in unwrapped(section)[0].model_fields}


def _is_section(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, BaseModel)


def expected(annotation: Any) -> str:
    """Says what a value of ``annotation`` looks like in YAML.

    Args:
        annotation: a type of :mod:`solo_ext.core.types`, a section, or a union of such.

    Returns:
        For example ``an integer above 0`` or ``a list, each a number from 0 to 1``.

    >>> expected(Annotated[int, Gt(0)])
    'an integer above 0'
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
    """The values of an annotation that consists of literals and null, else ``None``.

    >>> literal_choices(Literal["step", "epoch"] | None)
    ['step', 'epoch', 'null']
    """
    bare, _ = unwrapped(annotation)
    members = [unwrapped(m)[0] for m in union_members(bare) or (bare,)]
    literals = [m for m in members if get_origin(m) is Literal]
    null = ["null"] if type(None) in members else []
    if not literals or len(literals) + len(null) < len(members):
        return None
    return list(dict.fromkeys([str(v) for m in literals for v in get_args(m)] + null))


def unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    """An annotation without ``Annotated``, and its constraints."""
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
