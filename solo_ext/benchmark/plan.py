"""The runs of a benchmark."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from solo_ext import host
from solo_ext.benchmark.records import Kind
from solo_ext.benchmark.settings import BenchmarkSettings, Row
from solo_ext.config.check import check_run
from solo_ext.config.compose import compose
from solo_ext.errors import ConfigError, nearest
from solo_ext.methods import METHODS
from solo_ext.training.prepare import prepare


@dataclass(frozen=True)
class PlannedRun:
    """One cell of the grid.

    Attributes:
        key: digest of what decides its numbers; see :class:`solo_ext.benchmark.records.Record`.
        benchmark: title of the settings.
        dataset: folder of configs.
        budget: name in the settings.
        row: name in the settings.
        kind: whose method it is.
        seed: of the run.
        config: composed, not yet checked; ``teacher.path`` is set when the run is started.
        baseline: in place of training.
        evaluation: settings of the suite, by protocol.
        threads: CPU threads.
        teacher: the run that teaches it, or ``None``.
    """

    key: str
    benchmark: str
    dataset: str
    budget: str
    row: str
    kind: Kind
    seed: int
    config: dict[str, Any]
    baseline: str | None
    evaluation: dict[str, Any]
    threads: int
    teacher: str | None

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        return "-".join((self.dataset, self.budget, self.row, str(self.seed), self.key))

    def to_json(self) -> str:
        """For the process that runs it."""
        return json.dumps(asdict(self), indent=1)


def make_plan(
    settings: BenchmarkSettings,
    rows: Sequence[str] | None = None,
    changes: Sequence[str] = (),
) -> list[PlannedRun]:
    """All runs, one seed of everything before the next; nothing is started.

    Args:
        settings: the benchmark.
        rows: names of the rows to run; null: its default rows.
        changes: of the settings of every run.

    Raises:
        ConfigError: an unknown row, or a config that would not start.
    """
    names = list(rows if rows is not None else settings.default_rows or settings.rows)
    for name in names:
        if name not in settings.rows:
            raise ConfigError("--rows", name, "no such row", nearest(name, settings.rows, show=40))
    found: list[PlannedRun] = []
    for dataset in settings.datasets:
        for budget in settings.budgets:
            found += _planned(settings, dataset, budget, names, changes)
    order = {seed: place for place, seed in enumerate(settings.seeds)}
    return sorted(found, key=lambda run: -1 if run.kind == "teacher" else order[run.seed])


def _planned(
    settings: BenchmarkSettings,
    dataset: str,
    budget: str,
    names: Sequence[str],
    changes: Sequence[str],
) -> Iterable[PlannedRun]:
    teacher = None
    if settings.teacher is not None and _needed(settings, names):
        made = _runs(settings, dataset, budget, settings.teacher, changes, None)
        teacher = next(made)
        yield teacher
    for name in names:
        if name != settings.teacher:
            yield from _runs(settings, dataset, budget, name, changes, teacher)


def _needed(settings: BenchmarkSettings, names: Sequence[str]) -> bool:
    return any(settings.rows[n].baseline is None for n in names)


def _runs(
    settings: BenchmarkSettings,
    dataset: str,
    budget: str,
    name: str,
    changes: Sequence[str],
    teacher: PlannedRun | None,
) -> Any:
    row = settings.rows[name]
    of_all = [*settings.datasets[dataset].changes, *settings.budgets[budget], *changes]
    config = _composed(settings, dataset, row, of_all)
    taught = "teacher" in (config.get("method_kwargs") or {})
    of = teacher if taught else None
    is_teacher = name == settings.teacher
    seeds = [settings.teacher_seed] if is_teacher else settings.seeds
    evaluation = settings.evaluation
    kind: Kind = "host"
    if row.baseline is not None:
        kind = "baseline"
    elif is_teacher:
        kind = "teacher"
    elif config["method"] in METHODS:
        kind = "plugin"
    _check(config, of is not None)
    for seed in seeds:
        given = copy.deepcopy(config) | {"seed": seed}
        key = _key(given, row, evaluation, settings.threads, None if of is None else of.key)
        yield PlannedRun(
            key,
            settings.title,
            dataset,
            budget,
            name,
            kind,
            seed,
            given,
            row.baseline,
            evaluation,
            settings.threads,
            None if of is None else of.folder,
        )


def _composed(
    settings: BenchmarkSettings, dataset: str, row: Row, of_all: Sequence[str]
) -> dict[str, Any]:
    # A baseline has images and backbone of the first row that trains; a teacher has its own.
    others = (r.config for n, r in settings.rows.items() if r.config and n != settings.teacher)
    config = row.config or next(others, None)
    if config is None:
        raise ConfigError("rows", list(settings.rows), "no row trains", "give one a config")
    own = [] if row.config is None else row.changes
    folder = None if settings.config_path is None else Path(settings.config_path)
    return compose(f"{dataset}/{config}", [*own, *of_all], folder)


def _check(config: Mapping[str, Any], taught: bool) -> None:
    if taught:
        # The teacher is not there yet.
        check_run(config)
    else:
        prepare(config)


def _key(
    config: Mapping[str, Any],
    row: Row,
    evaluation: Mapping[str, Any],
    threads: int,
    teacher: str | None,
) -> str:
    """Where the data lies and what the run is called decide nothing."""
    relevant = copy.deepcopy(dict(config))
    for name in ("name", "checkpoint", "loggers", "wandb", "auto_resume", "hydra"):
        relevant.pop(name, None)
    for name in ("train_path", "val_path", "num_workers"):
        relevant["data"].pop(name, None)
    if teacher is not None:
        relevant["method_kwargs"]["teacher"]["path"] = teacher
    content = {
        "config": relevant,
        "baseline": row.baseline,
        "evaluation": evaluation,
        "threads": threads,
        "host": host.load().info.generation,
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
