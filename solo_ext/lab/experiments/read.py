"""Reading what a benchmark is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from solo_ext.config.check import validated
from solo_ext.config.compose import apply_overrides, parse
from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import ConfigError, UserError, nearest
from solo_ext.core.files import config_root, is_file
from solo_ext.data.digits import add_resolvers
from solo_ext.lab.evaluation.suite import read_suite_settings
from solo_ext.lab.experiments.settings import BenchmarkSettings


def shipped_benchmarks() -> list[str]:
    """Names of the shipped benchmarks."""
    folder = config_root() / "solo_ext" / "benchmark"
    return sorted(p.stem for p in folder.glob("*.yaml"))


def read_benchmark(name: str, overrides: Sequence[str] = ()) -> BenchmarkSettings:
    """Reads a shipped benchmark, or a YAML file of one's own.

    Args:
        name: of a shipped one such as ``digits``, or the path of a file.
        overrides: ``key=value`` in Hydra's grammar.

    Raises:
        ConfigError: no such benchmark, or settings that contradict each other.
        UserError: a file that cannot be read.
    """
    file = Path(name).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        file = config_root() / "solo_ext" / "benchmark" / f"{name}.yaml"
    if not is_file(file):
        raise ConfigError(
            "CONFIG", name, "no such benchmark", nearest(name, shipped_benchmarks(), show=40)
        )
    given = read_yaml(file)
    if not isinstance(given, dict):
        raise UserError(f"{file}: not a mapping; give the keys of a benchmark")
    try:
        cfg = OmegaConf.create(given)
    except Exception as error:
        # OmegaConf answers to odd keys in many ways, that of a parser among them.
        raise UserError(f"{file}: {(str(error).splitlines() or [''])[0]}") from None
    apply_overrides(cfg, parse(overrides))
    # Interpolations stay as they are written: paths of a machine are not part of a benchmark.
    plain = OmegaConf.to_container(cfg)
    assert isinstance(plain, dict)
    return checked_benchmark({str(k): v for k, v in plain.items()})


def checked_benchmark(given: dict[str, Any]) -> BenchmarkSettings:
    """Checks settings, and that the rows that they name are there.

    Raises:
        ConfigError: an unknown key or row, or a value out of range.
    """
    settings: BenchmarkSettings = validated(TypeAdapter(BenchmarkSettings), given)
    for name, row in settings.rows.items():
        if (row.config is None) == (row.baseline is None):
            raise ConfigError(
                f"rows.{name}", row.config, "a row has a config or a baseline", "give one of them"
            )
        _known(settings, f"rows.{name}.bases", row.bases)
    _known(settings, "default_rows", settings.default_rows or [])
    _known(settings, "teacher", [settings.teacher] if settings.teacher else [])
    for name, claim in settings.hypotheses.items():
        _known(settings, f"hypotheses.{name}", [claim.row, claim.base])
    suite_settings(settings.evaluation)
    return settings


def suite_settings(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What ``solo-ext eval suite`` takes, of the section ``evaluation``, interpolations resolved.

    Raises:
        ConfigError: an unknown protocol or a wrong setting of one.
    """
    own = {name: value for name, value in evaluation.items() if value is not None}
    given = _resolved({"protocols": list(evaluation), **own})
    read_suite_settings(given)
    return given


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with their interpolations resolved.

    Raises:
        UserError: one that leads nowhere.
    """
    add_resolvers()
    try:
        plain = OmegaConf.to_container(OmegaConf.create(dict(given)), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"benchmark: {str(error).splitlines()[0]}") from None
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def _known(settings: BenchmarkSettings, key: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in settings.rows:
            raise ConfigError(key, name, "no such row", nearest(name, settings.rows, show=40))
