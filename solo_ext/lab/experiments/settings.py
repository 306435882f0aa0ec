"""What a benchmark is: the typed content of ``configs/solo_ext/benchmark/<name>.yaml``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import Field, field_validator

from solo_ext.config.schema import Free, Section, Seed
from solo_ext.config.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", description="a name without spaces")
]
BASELINES = ("random-backbone", "raw-pixels")
"""Rows that train nothing; every benchmark may name them."""


class Row(Section):
    """A row of the table.

    Attributes:
        config: name of a config in the data set's folder; a baseline has none.
        changes: of its settings, ``key=value``.
        bases: rows that it is compared with, seed by seed.
        baseline: in place of a config.
        space: what tuning may change of this row, beside the shared space.
        label: what tables call it.
        reference: trained, but neither ranked nor the best of a table: it sees labels, or more
            than the others do.
    """

    config: str | None = None
    changes: list[str] = []
    bases: list[Name] = []
    baseline: Literal["random-backbone", "raw-pixels"] | None = None
    space: dict[str, Dimension] = {}
    label: str | None = None
    reference: bool = False


class Dimension(Section):
    """One setting that tuning draws: from ``choices``, or from ``low`` to ``high``."""

    choices: Annotated[list[Any], MinLen(1)] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False


class Tuning(Section):
    """How rows are tuned: every row by as many trials.

    Attributes:
        trials: of each row; the first is the row as it stands.
        holdout: share of the training images that a trial is scored on.
        measure: the score, as in ``headline``.
        space: what may change in every row.
        changes: of the settings of a trial.
        seed: of the draws and of the trials' runs.
    """

    trials: PositiveInt = 8
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.1
    measure: str = "knn"
    space: dict[str, Dimension] = {}
    changes: list[str] = []
    seed: Seed = 0


class Hypothesis(Section):
    """A claim of a paper, written down before the runs that decide it.

    Attributes:
        claim: what is expected, in a sentence.
        source: paper, year, place in it.
        row: the row that is expected above (``direction: above``) or below ``base``, or not above
            it (``not_above``).
        base: the other row.
        measure: the score.
        margin: points above ``base`` that ``not_above`` still takes for none.
        seeds: how many pairs the verdict needs at least.
        note: why it came out so, written afterwards.
    """

    claim: str
    source: str
    row: Name
    base: Name
    measure: str
    direction: Literal["above", "below", "not_above"] = "above"
    margin: NonNegativeFloat = 0
    seeds: Annotated[int, Ge(2)] = 5
    note: str = ""


class Reported(Section):
    """Which published numbers stand beside the table; every field must match exactly."""

    dataset: str
    backbone: str | None = None
    epochs: PositiveInt | None = None


class DatasetEntry(Section):
    """One data set of a benchmark.

    Attributes:
        changes: of the settings of all its runs.
        reported: published numbers to show beside its table; one selection, or several.
    """

    changes: list[str] = []
    reported: list[Reported] = []

    @field_validator("reported", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, dict) else given


class BenchmarkSettings(Section):
    """A grid: data sets x budgets x rows x seeds.

    Attributes:
        title: of the report.
        about: a paragraph for the report.
        datasets: by folder of configs.
        budgets: changes of every run, by name.
        seeds: seeds of the runs.
        rows: by name, in the order of the table.
        default_rows: rows that are run unless some are named; null: all.
        teacher: the row whose run (first seed of its own) is the teacher of the others.
        teacher_seed: its seed.
        evaluation: settings of ``solo-ext eval suite`` after the last epoch, by protocol; null is a
            protocol with its defaults.
        headline: scores in the order of the table, the first one ranks.
        threads: CPU threads of a run; numbers on a CPU depend on it.
        memory: gigabytes that a run is taken to need until one has been measured.
        tuning: how the rows are tuned, if at all.
        hypotheses: by a short name.
        config_path: folder of the user's own configs; null: the shipped ones.
    """

    title: str
    about: str = ""
    datasets: Annotated[dict[Name, DatasetEntry], MinLen(1)]
    budgets: Annotated[dict[Name, list[str]], MinLen(1)] = {"default": []}
    seeds: Annotated[list[Seed], MinLen(1)] = [1]
    rows: Annotated[dict[Name, Row], MinLen(1)]
    default_rows: list[Name] | None = None
    teacher: Name | None = None
    teacher_seed: NonNegativeInt = 0
    evaluation: Annotated[dict[str, Free | None], MinLen(1)] = {"knn": None, "linear": None}
    headline: list[str] | None = None
    threads: PositiveInt = 1
    memory: PositiveFloat = 2.0
    tuning: Tuning | None = None
    hypotheses: dict[Name, Hypothesis] = {}
    config_path: str | None = None
