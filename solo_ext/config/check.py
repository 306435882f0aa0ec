"""Validates a config against the schema and reports the first mistake in one line."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, Field, ValidationError, create_model

from solo_ext.config.schema import (
    DALI,
    TRAINER,
    Augmentation,
    Backbone,
    Batch,
    CommonConfig,
    Crop,
    Images,
    RunConfig,
)
from solo_ext.config.untrusted import refuse_interpolations, refuse_targets
from solo_ext.core.errors import ConfigError, UserError, suggest_name
from solo_ext.core.types import Section

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=Section)
_COMMON: dict[str, type[Section]] = {
    "backbone": Backbone,
    "data": Images,
    "optimizer": Batch,
    "dali": DALI,
}
_NEAREST, _EVERY_KEY = 5, "docs/reference/config.md"
_IRRELEVANT_TO_RESULTS = {
    "resume_from_checkpoint",
    "auto_resume",
    "wandb",
    "loggers",
    "checkpoint",
    "debug_augmentations",
    "log_every_n_steps",
    "data.num_workers",
    "data.start_method",
    "data.in_memory",
    "data.streaming.cache_dir",
    "data.streaming.cache_limit",
    "data.streaming.download_retry",
    "data.streaming.download_timeout",
    "data.streaming.anonymous",
    "method_kwargs.features_dir",
    "method_kwargs.clusters.features_dir",
    "on_nonfinite",
}
_CAME_LATER = {
    "performance.compile": False,
    "performance.graphs": False,
    "method_kwargs.batch_norm_splits": 1,
    "method_kwargs.exclude_own": False,
    "method_kwargs.anneal_beta": False,
    "method_kwargs.support_set.exact": True,
}
"""Keys that configs of earlier versions lack, and the values that applied to them."""


@functools.cache
def trainer_arguments() -> tuple[str, ...]:
    """Names of the arguments of Lightning's ``Trainer`` that a config may set.

    They are read from its file, because to import Lightning takes seconds.

    >>> "max_epochs" in trainer_arguments(), "callbacks" in trainer_arguments()
    (True, False)
    """
    package = importlib.util.find_spec("lightning")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "pytorch" / "trainer" / "trainer.py"
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            (init,) = (n for n in node.body if getattr(n, "name", "") == "__init__")
            assert isinstance(init, ast.FunctionDef)
            found += [a.arg for a in (*init.args.args, *init.args.kwonlyargs)]
    ours = {"self", "logger", "callbacks", "default_root_dir", "enable_checkpointing"}
    return tuple(name for name in found if name not in ours)


def check_run(config: Mapping[str, Any]) -> RunConfig:
    """Validates a composed config and fills in its defaults.

    Returns:
        The typed config; arguments of the Trainer that the schema does not name are extra fields.

    Raises:
        ConfigError: a key is unknown or missing, a value has the wrong type or range, or the config
            contains a ``_target_``, which names code, or an interpolation.

    >>> check_run({"name": "a run", "_target_": "os.system"})
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: _target_='os.system': a config names Python to run; ...
    """
    refuse_targets(config)
    refuse_interpolations(config)
    checked = validated(_run_model(), config)
    known = RunConfig.model_fields.keys() | checked.model_fields_set
    values = {name: getattr(checked, name) for name in type(checked).model_fields if name in known}
    return RunConfig.model_construct(checked.model_fields_set, **values)


def check_sections(config: Mapping[str, Any]) -> None:
    """Refuses what :func:`check_run` would, but for values that only the Trainer may know.

    It imports neither torch nor Lightning, so that a mistake is told at once.

    Raises:
        ConfigError: as of :func:`check_run`.

    >>> check_sections({"method": "simclr", "optimizer": {"batch_size": 0}})
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: ...
    """
    refuse_targets(config)
    refuse_interpolations(config)
    validated(_extended(dict.fromkeys(trainer_arguments(), (Any, None))), config)


def common_config(config: Mapping[str, Any] | DictConfig) -> CommonConfig:
    """Reads the keys of ``CommonConfig`` from a host's or a saved run's config; ignores all others.

    Raises:
        ConfigError: a key that is read is missing or of the wrong type.

    >>> saved = {
    ...     "backbone": {"name": "resnet18"},
    ...     "data": {"dataset": "cifar10", "reader": "lmdb"},  # a key of another program
    ...     "augmentations": [{"crop_size": 32}],
    ...     "optimizer": {"batch_size": 256},
    ... }
    >>> config = common_config(saved)
    >>> config.backbone.name, config.data.dataset, config.augmentations[0].crop_size
    ('resnet18', 'cifar10', 32)
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    found = known_keys(CommonConfig, config)
    for name, section in _COMMON.items():
        if name in found:
            found[name] = known_keys(section, found[name])
    if isinstance(found.get("augmentations"), list):
        found["augmentations"] = [_view(entry) for entry in found["augmentations"]]
    return validated(CommonConfig, found)


def _view(entry: Any) -> Any:
    """An entry of ``augmentations`` as a whole, or its crop alone if other programs wrote it."""
    try:
        return Augmentation.model_validate(known_keys(Augmentation, entry))
    except ValidationError:
        return known_keys(Crop, entry)


def known_keys(section: type[Section], given: Any) -> Any:
    """Drops nulls and the keys that ``section`` does not define, so that its defaults apply.

    >>> known_keys(Batch, {"batch_size": 256, "accumulate": 2})
    {'batch_size': 256}
    """
    if not isinstance(given, Mapping):
        return given
    return {k: v for k, v in given.items() if k in section.model_fields and v is not None}


def check_method_kwargs(kwargs_type: type[S], given: Mapping[str, Any]) -> S:
    """Validates ``method_kwargs`` and fills in its defaults.

    Args:
        kwargs_type: the method's settings class. Its class attribute ``SYNONYMS``, if there is one,
            maps alternative keys to the keys that they stand for.
        given: the mapping in the config.

    Raises:
        ConfigError: as :func:`check_run`, or a key and its synonym have different values.

    >>> class Kwargs(Section):
    ...     temperature: float = 0.2
    >>> check_method_kwargs(Kwargs, {})
    Kwargs(temperature=0.2)
    >>> check_method_kwargs(Kwargs, {"temperatur": 0.1})
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: method_kwargs.temperatur=0.1: unknown key; did you mean ...
    """
    if not issubclass(kwargs_type, BaseModel):
        raise UserError(
            f"{kwargs_type.__name__} describes a method's settings and is no pydantic class; "
            "derive it from solo_ext.core.types.Section"
        )
    named = _without_synonyms(given, getattr(kwargs_type, "SYNONYMS", {}))
    return validated(kwargs_type, named, prefix="method_kwargs")


def _without_synonyms(given: Mapping[str, Any], synonyms: Mapping[str, str]) -> dict[str, Any]:
    named = dict(given)
    for synonym in [name for name in synonyms if name in named]:
        value, key = named.pop(synonym), synonyms[synonym]
        section, _, name = key.rpartition(".")
        place = (named.get(section) or {}) if section else named
        if not isinstance(place, Mapping):
            # Leave it: the validation that follows reports that this is not a mapping.
            continue
        held = place.get(name)
        if held not in (None, value):
            problem = f"here it is method_kwargs.{key}, which is {held}"
            raise ConfigError(f"method_kwargs.{synonym}", value, problem, "give one of them")
        named |= {section: {**place, name: value}} if section else {name: value}
    return named


@functools.cache
def _run_model() -> type[RunConfig]:
    """Extends :class:`RunConfig` by the Trainer's arguments, of the types that YAML can express."""
    from lightning.pytorch import Trainer

    hints = {**get_type_hints(Trainer.__init__), **TRAINER}
    fields: dict[str, Any] = {
        name: (_of_yaml(hints[name]), Field(None, validate_default=False))
        for name in trainer_arguments()
    }
    precision = RunConfig.model_fields["precision"].default
    exact = (Literal["auto"] | _of_yaml(hints["precision"]), precision)
    return _extended(fields, precision=exact)


def _extended(fields: Mapping[str, Any], **instead: Any) -> type[RunConfig]:
    """Extends :class:`RunConfig` by fields that it lacks, and forbids all others."""
    more = {name: field for name, field in fields.items() if name not in RunConfig.model_fields}
    return create_model(
        "RunConfig",
        __base__=RunConfig,
        __module__=RunConfig.__module__,
        __cls_kwargs__={"extra": "forbid"},
        **more,
        **instead,
    )


def _of_yaml(hint: Any) -> Any:
    """Keeps the members of a union that YAML can express; ``None`` if there are none."""
    union = get_origin(hint) in (Union, types.UnionType)
    plain = [m for m in (get_args(hint) if union else (hint,)) if _is_plain(m)]
    return functools.reduce(operator.or_, plain) if plain else None


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_plain(get_args(hint)[0])
    if origin in (list, dict):
        return all(_is_plain(inner) for inner in get_args(hint))
    return origin is Literal or hint in (int, float, str, bool, type(None))


def validated(kind: type[M], given: Mapping[str, Any], *, prefix: str = "") -> M:
    """Validates the section at the dotted key ``prefix``; reports the first mistake in one line.

    Raises:
        ConfigError: ``given`` has a mistake: an unknown key, else the first in schema order.

    >>> validated(Batch, {"batch_size": 256})
    Batch(batch_size=256)
    >>> validated(Batch, {"batch_size": 0}, prefix="optimizer")
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: optimizer.batch_size=0: not a valid value; allowed: ...
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise _first_mistake(error, kind, given, prefix) from None


def _first_mistake(
    error: ValidationError, kind: type[BaseModel], given: Mapping[str, Any], prefix: str
) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key gives two errors, unknown and missing: report the unknown key, it says more.
    first = min(problems, key=lambda p: p["type"] not in ("extra_forbidden", "invalid_key"))
    loc, value, what = first["loc"], first["input"], first["type"]
    no_text = what == "invalid_key" or (loc[-1] == "[key]" and what != "extra_forbidden")
    if no_text:
        loc = loc[: -1 if what == "invalid_key" else -2]
    path = _path(given, loc)
    if what == "missing":
        path.append(loc[-1])
    key = ".".join(str(part) for part in ((prefix,) if prefix else ()) + tuple(path))
    if no_text:
        return ConfigError(key, value, "this key is no text", "keys are text: quote or remove it")
    if what == "extra_forbidden":
        keys = _keys(kind, path[:-1])
        remedy = suggest_name(str(loc[-1]), keys, show=_NEAREST)
        # Settings of a protocol or a method stand on pages of their own.
        if len(keys) > _NEAREST and kind.__module__ == Images.__module__:
            remedy += f"; every key: {_EVERY_KEY}"
        return ConfigError(key, value, "unknown key", remedy)
    if what == "missing":
        return ConfigError(key, None, "this key is required", "give it a value")
    # pydantic reports one error per member of a union: combine those of this key.
    alike = [p for p in problems if _path(given, p["loc"]) == path]
    if isinstance(value, str | int) and all(p["type"] == "literal_error" for p in alike):
        choices = ", ".join(p["ctx"]["expected"] for p in alike).replace("'", "")
        names = dict.fromkeys(choices.replace(" or ", ", ").split(", "))
        remedy = suggest_name(str(value), names, show=40)
        return ConfigError(key, value, "not a valid choice", remedy)
    allowed = ", or ".join(dict.fromkeys(_allowed(p["msg"]) for p in alike))
    return ConfigError(key, value, "not a valid value", f"allowed: {allowed}")


def _allowed(message: str) -> str:
    words = message.removeprefix("Input should be ").partition(" or instance of ")[0]
    words = re.sub(r"^\w+ should have (.*?)( after validation.*|$)", r"\1", words)
    return words.replace("a valid dictionary", "a mapping")


def _path(given: Any, loc: Sequence[int | str]) -> list[int | str]:
    """The keys in a pydantic error location, without the union members that it also names."""
    path: list[int | str] = []
    for part in loc:
        items = given if isinstance(given, list | tuple) else ()
        entries = given if isinstance(given, Mapping) else dict(enumerate(items))
        if part in entries:
            path.append(part)
            given = entries[part]
    return path


def _keys(kind: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """Names of the keys that are allowed in the section at ``path``."""
    kinds = [kind]
    for part in path:
        fields = [k.model_fields[part] for k in kinds if part in k.model_fields]
        # List indices and keys of plain mappings are not fields: stay in the same section.
        kinds = [s for f in fields for s in _sections(f.annotation)] if fields else kinds
    return {key for kind in kinds for key in kind.model_fields}


def setting_called(name: str) -> str | None:
    """The key that somebody may mean who gives a setting as an option; none if no name is alike.

    >>> setting_called("--epochs"), setting_called("--batch-size"), setting_called("--backbone")
    ('max_epochs', 'optimizer.batch_size', 'backbone.name')
    >>> setting_called("--help") is None
    True
    """
    wanted = name.lstrip("-").replace("-", "_").lower()
    level: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    while level:
        keys = [
            (f"{at}{key}", key, f) for at, kind in level for key, f in kind.model_fields.items()
        ]
        for fits in (wanted.__eq__, lambda key: key.endswith(f"_{wanted}")):
            for path, key, field in keys:
                inner = {k for s in _sections(field.annotation) for k in s.model_fields}
                # Of a section, what chooses it.
                chosen = sorted(inner & {"name", "enabled"})
                if fits(key) and (chosen or not inner):
                    return ".".join([path, *chosen])
        level = [(f"{path}.", s) for path, _, f in keys for s in _sections(f.annotation)]
    return None


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes in a type such as ``list[Augmentation] | None``."""
    if arguments := get_args(annotation):
        return [section for inner in arguments for section in _sections(inner)]
    known = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if known else []


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that can change the results, by dotted key, with integers as floats.

    A config of an earlier version has the same settings as today's, although it lacks keys.

    >>> result_settings({"loggers": [], "optimizer": {"lr": 1, "exclude": True}})
    {'optimizer.lr': 1.0, 'optimizer.exclude': True}
    >>> result_settings({"performance": {"graphs": False, "compile": True}})
    {'performance.compile': True}
    """
    flat: dict[str, Any] = {}

    def number(value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def walk(value: Any, key: str) -> None:
        if key in _IRRELEVANT_TO_RESULTS or (key in _CAME_LATER and value == _CAME_LATER[key]):
            return
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value):
            for place, inner in enumerate(value):
                walk(inner, f"{key}.{place}")
        else:
            flat[key] = [number(v) for v in value] if isinstance(value, list) else number(value)

    walk(config, "")
    return flat
