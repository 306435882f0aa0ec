"""The settings of a benchmark: the typed content of ``configs/solo_ext/benchmark/<name>.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Lt, MinLen
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from solo_ext.config.check import validated
from solo_ext.config.compose import apply_overrides, parse
from solo_ext.config.schema import Free, Seed
from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import ConfigError, UserError, first_line, suggest_name
from solo_ext.core.files import config_root, is_file, read_text
from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from solo_ext.data.digits import add_resolvers

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", description="a name without spaces")
]


class Dimension(Section):
    """One setting that tuning draws from ``choices``, or between ``low`` and ``high``.

    >>> Dimension(low=0.01, high=1.0, log=True)
    Dimension(choices=None, low=0.01, high=1.0, log=True)
    """

    choices: Annotated[list[Any], MinLen(1)] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        low, high = self.low, self.high
        ranged = low is not None and high is not None and low < high and (low > 0 or not self.log)
        if self.choices is None and not ranged:
            raise PydanticCustomError("range", "choices, or low < high, above 0 if log is true")
        return self


class Row(Section):
    """A row of the table: a config of the data set's folder, or a baseline.

    Attributes:
        bases: rows that it is compared with, seed by seed.
        space: settings of this row that tuning may change, besides the shared space.

    >>> Row(config="pcl", changes=["optimizer.lr=0.1"], bases=["simclr"]).changes
    ['optimizer.lr=0.1']
    """

    config: str | None = None
    changes: list[str] = []
    bases: list[Name] = []
    baseline: Literal["random-backbone", "raw-pixels"] | None = None
    space: dict[str, Dimension] = {}
    label: str | None = None

    @model_validator(mode="after")
    def _trains_or_not(self) -> Self:
        if (self.config is None) == (self.baseline is None):
            raise PydanticCustomError("row", "a config or a baseline")
        return self


class Tuning(Section):
    """How rows are tuned: each by the same number of trials, the first of which changes nothing.

    Attributes:
        holdout: share of the training images that scores a trial.
        measure: name of the score, as in ``headline``.
        rungs: epochs of shorter trainings, ascending, after each of which only the best quarter of
            a row's trials, rounded up, and the unchanged row go on, to start anew with more epochs
            (successive halving, Jamieson and Talwalkar 2016, arXiv 1502.07943). Empty: all train as
            long as the row.

    >>> Tuning(trials=4, space={"optimizer.lr": {"low": 0.01, "high": 1.0, "log": True}}).measure
    'knn'
    """

    trials: PositiveInt = 8
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.1
    measure: str = "knn"
    rungs: list[PositiveInt] = []
    space: dict[str, Dimension] = {}


class Hypothesis(Section):
    """A claim of a paper, written down before the runs that decide it.

    Attributes:
        row: the row that is expected above ``base`` in ``measure``, or not above it, or equal.
        margin: points by which ``row`` may be above ``base`` for ``not_above``, or differ from it
            for ``equal``.
        seeds: least number of pairs for a verdict.
        expected: the difference in points that the source or a calculation leads to, as text.
        isolates: the only keys or sections of the config in which the two rows may differ; if they
            differ in others too, the verdict is undecided. Null: not checked.
        note: explanation of the outcome, written afterwards.

    >>> claim = {"claim": "neighbours help", "source": "arXiv 2104.14548"}
    >>> Hypothesis(**claim, row="nnclr", base="simclr", measure="knn").direction
    'above'
    """

    claim: str
    source: str
    row: Name
    base: Name
    measure: str
    direction: Literal["above", "not_above", "equal"] = "above"
    margin: NonNegativeFloat = 0
    seeds: Annotated[int, Ge(2)] = 5
    expected: str = ""
    isolates: list[str] | None = None
    note: str = ""


class Stage(Section):
    """Runs of one budget that belong together: some rows, with some seeds, seed by seed.

    Attributes:
        seeds: only those that the benchmark has too are run.
        near: only the rows whose run of the benchmark's first seed lies within so many points of
            the first of its bases in the first headline score, and these bases; a row without
            such a pair of records is not run yet. Null: all rows.
        teacher_budget: the budget of the teacher, if it is not the students'.
        minutes: minutes that a run takes, measured or estimated, beside as many others as the
            benchmark's description says.

    >>> Stage(budget="50", rows=["simclr", "pcl"], seeds=[2, 3], near=1.0).near
    1.0
    """

    budget: Name
    rows: Annotated[list[Name], MinLen(1)]
    seeds: Annotated[list[Seed], MinLen(1)]
    near: PositiveFloat | None = None
    teacher_budget: Name | None = None
    minutes: PositiveFloat | None = None


class BenchmarkSettings(Section):
    """Data sets x stages; a stage is rows x seeds with one budget.

    Attributes:
        datasets: changes of the settings of every run of a data set, by its folder of configs.
        budgets: changes that apply to every run of a budget, by its name.
        stages: by name, run in this order; empty: one for each budget, of all rows and seeds.
        teacher: the row whose run, of seed 0, is the teacher of the others.
        evaluation: settings of ``solo-ext eval suite`` after the last epoch, by protocol; null
            means a protocol's defaults.
        headline: scores in the order of the table; the curves show the first one.
        threads: CPU threads of a run; numbers on a CPU depend on it.
        minutes: measured minutes that a run takes with these threads, evaluation included.
        config_path: folder of the user's own configs; null: the shipped ones.

    >>> rows = {"pcl": {"config": "pcl", "bases": ["simclr"]}, "simclr": {"config": "simclr"}}
    >>> settings = BenchmarkSettings(title="mine", datasets={"digits": []}, rows=rows, seeds=[1, 2])
    >>> [(stage.budget, stage.rows, stage.seeds) for stage in settings.every_stage()]
    [('default', ['pcl', 'simclr'], [1, 2])]
    """

    title: str
    about: str = ""
    datasets: Annotated[dict[Name, list[str]], MinLen(1)]
    budgets: Annotated[dict[Name, list[str]], MinLen(1)] = {"default": []}
    seeds: Annotated[list[Seed], MinLen(1)] = [1]
    rows: Annotated[dict[Name, Row], MinLen(1)]
    stages: dict[Name, Stage] = {}
    teacher: Name | None = None
    evaluation: Annotated[dict[str, Free | None], MinLen(1)] = {"knn": None, "linear": None}
    headline: list[str] | None = None
    threads: PositiveInt = 1
    minutes: PositiveFloat | None = None
    tuning: Tuning | None = None
    hypotheses: dict[Name, Hypothesis] = {}
    config_path: str | None = None

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        self.check_rows("teacher", [self.teacher] if self.teacher else [])
        trained: dict[str, str] = {}
        for name, row in self.rows.items():
            self.check_rows(f"rows.{name}.bases", row.bases)
            first = trained.setdefault(f"{row.config} {row.baseline} {row.changes}", name)
            # The teacher has a seed of its own.
            if first != name and self.teacher not in (first, name):
                remedy = "leave one of them out, or change it"
                raise ConfigError("rows", [first, name], "are the same run", remedy)
        for name, stage in self.stages.items():
            key = f"stages.{name}"
            self.check_rows(f"{key}.rows", stage.rows)
            for of in ("budget", "teacher_budget"):
                value = getattr(stage, of)
                if value is not None and value not in self.budgets:
                    remedy = suggest_name(value, self.budgets)
                    raise ConfigError(f"{key}.{of}", value, "no such budget", remedy)
            if stage.near is not None and not self.headline:
                problem = "rows are compared by the first headline score"
                raise ConfigError(f"{key}.near", stage.near, problem, "give headline")
        for measure in self.headline or ():
            self._check_measure("headline", measure)
        if self.tuning is not None:
            self._check_measure("tuning.measure", self.tuning.measure)
        for name, claim in self.hypotheses.items():
            key = f"hypotheses.{name}"
            self.check_rows(f"{key}.row", [claim.row])
            self.check_rows(f"{key}.base", [claim.base])
            self._check_measure(f"{key}.measure", claim.measure)
            if claim.row == claim.base:
                raise ConfigError(f"{key}.base", claim.base, "is the row itself", "name another")
            if claim.direction == "equal" and not claim.margin:
                remedy = "give the points within which both rows count as equal"
                problem = "no interval lies within it"
                raise ConfigError(f"{key}.margin", claim.margin, problem, remedy)
        return self

    def check_rows(self, key: str, names: Sequence[str]) -> None:
        """Refuses the name of a row that does not exist."""
        for name in names:
            if name not in self.rows:
                raise ConfigError(key, name, "no such row", suggest_name(name, self.rows))

    def _check_measure(self, key: str, measure: str) -> None:
        """Refuses a score that no protocol gives; names start with the protocol: ``knn_acc5``."""
        protocols = self.evaluation
        if not any(measure == p or measure.startswith(f"{p}_") for p in protocols):
            problem = "no protocol of the evaluation gives it"
            raise ConfigError(key, measure, problem, suggest_name(measure, protocols))
        if (short := short_name(measure)) != measure:
            raise ConfigError(key, measure, "records leave acc1 out of a name", f"write {short}")

    def every_stage(self) -> list[Stage]:
        """The stages; if there are none, one for each budget, of all rows and seeds."""
        return list(self.stages.values()) or [
            Stage(budget=budget, rows=list(self.rows), seeds=self.seeds, minutes=self.minutes)
            for budget in self.budgets
        ]

    def seeds_of(self, row: str, stage: Stage | None = None) -> list[int]:
        """Seeds of a row's runs, all or those of a stage; 0 for the teacher, which all share."""
        if row == self.teacher:
            return [0]
        return [seed for seed in (stage or self).seeds if seed in self.seeds]


def short_name(score: str) -> str:
    """The name of a score in records, which is that of ``solo-ext eval`` without ``acc1``.

    >>> short_name("knn_acc1"), short_name("lowshot_acc1_10_per_class")
    ('knn', 'lowshot_10_per_class')
    """
    return score.replace("acc1", "").strip("_").replace("__", "_")


def shipped_benchmarks() -> list[str]:
    """Names of the shipped benchmarks.

    >>> shipped_benchmarks()[:3]
    ['cifar10', 'cifar10-cpu', 'cifar100']
    """
    folder = config_root() / "solo_ext" / "benchmark"
    return sorted(p.stem for p in folder.glob("*.yaml"))


def benchmark_file(name: str) -> Path:
    """The file of a shipped benchmark such as ``digits``, or the user's own YAML file.

    Raises:
        ConfigError: there is none of that name.

    >>> benchmark_file("demo").name
    'demo.yaml'
    """
    file = Path(name).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        file = config_root() / "solo_ext" / "benchmark" / f"{name}.yaml"
    if not is_file(file):
        remedy = suggest_name(name, shipped_benchmarks())
        raise ConfigError("CONFIG", name, "no such benchmark", remedy)
    return file


def read_benchmark(name: str, overrides: Sequence[str] = ()) -> BenchmarkSettings:
    """Reads a shipped benchmark such as ``digits``, or the user's own YAML file.

    Raises:
        ConfigError: no such benchmark, or settings that contradict each other.
        UserError: a file that cannot be read.

    >>> read_benchmark("demo", ["seeds=[1,2]"]).seeds
    [1, 2]
    """
    file = benchmark_file(name)
    given = read_yaml(file)
    if not isinstance(given, dict):
        raise UserError(f"{file}: not a mapping; give the keys of a benchmark")
    try:
        # OmegaConf reads 1e-5 as a number, as in configs of runs; PyYAML reads it as text.
        cfg = OmegaConf.create(read_text(file))
    except Exception as error:
        # OmegaConf raises many types of error for odd keys, also those of its parser.
        raise UserError(f"{file}: {' '.join(str(error).split())}") from None
    assert isinstance(cfg, DictConfig)
    apply_overrides(cfg, parse(overrides))
    # Keep interpolations as written: paths of a machine are not part of a benchmark.
    plain = OmegaConf.to_container(cfg)
    assert isinstance(plain, dict)
    return checked_benchmark({str(k): v for k, v in plain.items()})


def checked_benchmark(given: Mapping[str, Any]) -> BenchmarkSettings:
    """Validates the settings of a benchmark, including those of its protocols.

    Raises:
        ConfigError: an unknown key, row or score, or a value out of range.

    >>> rows = {"simclr": {"config": "simclr"}}
    >>> checked_benchmark({"title": "mine", "datasets": {"digits": []}, "rows": rows}).seeds
    [1]
    """
    # Import it here: the protocols import torch, which a report does not need.
    from solo_ext.lab.evaluation.suite import read_suite_settings

    settings = validated(BenchmarkSettings, given)
    read_suite_settings(suite_settings(settings.evaluation))
    return settings


def suite_settings(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for ``solo-ext eval suite``, with interpolations resolved.

    >>> suite_settings({"knn": {"k": [5]}, "linear": None})
    {'protocols': ['knn', 'linear'], 'knn': {'k': [5]}}
    """
    own = {name: value for name, value in evaluation.items() if value is not None}
    add_resolvers()
    try:
        given: Any = OmegaConf.to_container(
            OmegaConf.create({"protocols": list(evaluation), **own}), resolve=True
        )
    except OmegaConfBaseException as error:
        raise UserError(f"benchmark: {first_line(error)}") from None
    return {str(k): v for k, v in given.items()}
