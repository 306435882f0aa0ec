"""Checking a config against the schema: one line for the first mistake."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from solo_ext.config.code import refuse_interpolations, refuse_targets
from solo_ext.config.expected import expected, literal_choices, union_members, unwrapped
from solo_ext.config.schema import TRAINER, Run, Section
from solo_ext.core.errors import ConfigError, nearest


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
        ConfigError: an unknown key, a missing one, or a value of the wrong type or range; a
            ``_target_``, which names code; an interpolation.
    """
    refuse_targets(config)
    refuse_interpolations(config)
    run = validated(_run_model(), config)
    passed = run.model_fields_set - Run.model_fields.keys()
    filled: dict[str, Any] = run.model_dump(include=Run.model_fields.keys() | passed)
    return filled


def check_method_kwargs(kwargs_type: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks ``method_kwargs`` against a method's dataclass and fills in its defaults.

    Keys of the class attribute ``SYNONYMS``, if there is one, stand for those that it maps them to.

    Raises:
        ConfigError: as :func:`check_run`; a key and its synonym with two values.
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
            # No mapping where there must be one, which is complained of next.
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
    """:class:`Run` and the Trainer's arguments, as far as YAML can write their values."""
    from lightning.pytorch import Trainer

    hints = {**get_type_hints(Trainer.__init__), **TRAINER}
    fields: dict[str, Any] = {
        name: (_of_yaml(hints[name]), None)
        for name in trainer_arguments()
        if name not in Run.model_fields
    }
    precision = Run.model_fields["precision"].default
    fields["precision"] = (_of_yaml(hints["precision"]), precision)
    return TypeAdapter(create_model("Run", __base__=Run, **fields))


def _of_yaml(hint: Any) -> Any:
    """The part of a type that plain values can have."""
    plain = [m for m in union_members(hint) or (hint,) if _is_plain(m)]
    return functools.reduce(operator.or_, plain) if plain else None


def _is_plain(hint: Any) -> bool:
    bare = unwrapped(hint)[0]
    if get_origin(bare) in (list, dict):
        return all(_is_plain(inner) for inner in get_args(bare))
    return get_origin(bare) is Literal or bare in (int, float, str, bool, type(None))


@functools.cache
def _model_of(kwargs_type: type) -> TypeAdapter[Any]:
    """Checks against :func:`_section_of` a dataclass."""
    return TypeAdapter(_section_of(kwargs_type))


def _section_of(kwargs_type: type, preset: Any = None) -> type[Section]:
    """A strict pydantic model with the fields of a dataclass, and of those within it.

    Args:
        kwargs_type: the dataclass.
        preset: an instance, whose values take the place of the dataclass's own defaults.
    """
    hints = get_type_hints(kwargs_type, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kwargs_type):
        hint = hints[field.name]
        held = field.default if preset is None else getattr(preset, field.name)
        if dataclasses.is_dataclass(hint):
            # What a config leaves out of the section keeps the preset's value.
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
            # So that a default of 0 and a 0 out of YAML become the same 0.0.
            default = Field(field.default, validate_default=True)
        fields[field.name] = (hint, default)
    return create_model(kwargs_type.__name__, __base__=Section, **fields)


def validated(adapter: TypeAdapter[Any], given: Mapping[str, Any], *, prefix: str = "") -> Any:
    """Validates and turns pydantic's complaints into one line.

    Args:
        adapter: of a :class:`Section`.
        given: plain mapping.
        prefix: dotted key of the section, empty for the root.

    Raises:
        ConfigError: an unknown key if there is one, else the first mistake of the schema's order.
    """
    try:
        return adapter.validate_python(dict(given))
    except ValidationError as error:
        raise _first_mistake(error, adapter._type, prefix) from None


def _first_mistake(error: ValidationError, root: Any, prefix: str) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key is both unknown and, under its right name, missing: the former says more.
    first = min(problems, key=lambda p: p["type"] not in ("extra_forbidden", "invalid_key"))
    kind, value, loc = first["type"], first["input"], first["loc"]
    if kind == "invalid_key" or (loc[-1:] == ("[key]",) and kind != "extra_forbidden"):
        # Here pydantic's input is the key, which it names as another type in the path.
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
    """The keys of a place that pydantic names, and the annotation there.

    pydantic also names which branch of a union it tried; users know no such key.
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
    """The branches of a union without null; other annotations are their own only one."""
    members = union_members(unwrapped(annotation)[0]) or (annotation,)
    return [m for m in members if m is not type(None)]


def _below(annotation: Any, part: Any) -> Any:
    """The annotation of one key or entry of a section, list or mapping; ``None`` if it has none."""
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
