"""Tunes every row with the same effort, scored on held-out training images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from solo_ext.config.schema import Scheduler
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import write_text
from solo_ext.lab.evaluation.evaluate import PROTOCOLS
from solo_ext.lab.experiments.plan import PlannedRun, composed
from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.settings import (
    BenchmarkSettings,
    Dimension,
    Row,
    Stage,
    Tuning,
)

_GOES_ON = 0.25
"""Share of a row's trials that a rung lets go on."""


def trial_settings(
    settings: BenchmarkSettings, rows: Sequence[str] | None = None
) -> BenchmarkSettings:
    """A benchmark whose rows are the trials, ``<row>.<number>``; number 0 is the unchanged row.

    Its stages are the rungs, such as ``5-epochs``, and last the budget of the benchmark itself;
    every trial is in each of them.

    Trial n of a row is the n-th point of a scrambled Sobol sequence, whatever earlier trials
    scored: trials can run side by side, and a stopped search continues unchanged. A trial whose
    config is that of an earlier one is left out.

    Raises:
        ConfigError: no section ``tuning``, several data sets or budgets, a row that does not train,
            a measure that the evaluation does not give or that has no better direction, no setting
            to tune, or rungs that do not ascend from the warm-up of every row to its epochs.

    >>> from solo_ext.lab.experiments.settings import checked_benchmark
    >>> tuning = {"trials": 2, "space": {"optimizer.lr": {"choices": [0.1, 0.3]}}}
    >>> given = {"title": "mine", "datasets": {"digits": []}, "rows": {"pcl": {"config": "pcl"}}}
    >>> list(trial_settings(checked_benchmark({**given, "tuning": tuning})).rows)
    ['pcl.0', 'pcl.1']
    """
    tuning = _tuning(settings)
    _lower_is_better(tuning.measure)
    if len(settings.datasets) * len(settings.budgets) > 1:
        remedy = "tune them one by one, with overrides such as '~budgets.800'"
        names = list(settings.datasets)
        raise ConfigError("datasets", names, "tuning takes one data set and budget", remedy)
    trainable = [
        name
        for name, row in settings.rows.items()
        if row.baseline is None and name != settings.teacher
    ]
    (dataset,), ((budget, of_all),) = settings.datasets, settings.budgets.items()
    trials, epochs = dict[str, Row](), 1
    for name in rows or trainable:
        if name not in trainable:
            listed = ", ".join(trainable)
            raise ConfigError("--rows", name, "not a row to tune", f"allowed: {listed}")
        row, tried = settings.rows[name], list[dict[str, Any]]()
        for number, drawn in enumerate(_draws(tuning, name, row)):
            changes = [*row.changes, *(f"{key}={json.dumps(v)}" for key, v in drawn.items())]
            trial = Row(config=row.config, changes=changes)
            config = composed(settings, dataset, budget, trial)
            if tuning.rungs:
                _check_rungs(tuning.rungs, name, config)
            epochs = max(epochs, config["max_epochs"])
            if config not in tried:
                tried.append(config)
                trials[f"{name}.{number}"] = trial
    rungs = {f"{n}-epochs": n for n in tuning.rungs} | {budget: epochs}
    if len(rungs) == len(tuning.rungs):
        raise ConfigError("budgets", budget, "a rung has this name", "give another")
    return settings.model_copy(
        update={
            "title": f"{settings.title}, tuning",
            "datasets": {
                name: [*changes, f"data.holdout={tuning.holdout}"]
                for name, changes in settings.datasets.items()
            },
            "budgets": {
                name: of_all if name == budget else [*of_all, f"max_epochs={n}"]
                for name, n in rungs.items()
            },
            "seeds": [0],
            "rows": {**trials, **{n: r for n, r in settings.rows.items() if n == settings.teacher}},
            "stages": {
                name: Stage(
                    budget=name,
                    rows=list(trials),
                    seeds=[0],
                    # One teacher, trained to its end, has the students of every rung.
                    teacher_budget=settings.teacher and budget,
                    minutes=settings.minutes and settings.minutes * n / epochs,
                )
                for name, n in rungs.items()
            },
            "hypotheses": {},
        }
    )


def _check_rungs(rungs: Sequence[int], name: str, config: Mapping[str, Any]) -> None:
    epochs, schedule, warmup = config["max_epochs"], config["scheduler"], 0
    if schedule["name"] == "warmup_cosine":
        # Other schedules have no warm-up, whatever is set.
        warmup = schedule.get("warmup_epochs", Scheduler.model_fields["warmup_epochs"].default)
    ascending = [*rungs, epochs]
    if ascending != sorted(set(ascending)):
        problem = f"do not ascend to the {epochs} epochs of {name}"
        raise ConfigError("tuning.rungs", list(rungs), problem, "give fewer epochs first")
    if rungs[0] <= warmup:
        problem = f"the first ends within the {warmup} epochs of warm-up of {name}"
        raise ConfigError("tuning.rungs", list(rungs), problem, "give more epochs")


def search(
    trials: BenchmarkSettings,
    plan: Sequence[PlannedRun],
    run_all: Callable[[BenchmarkSettings, list[PlannedRun]], Sequence[Record]],
) -> dict[str, float]:
    """Runs all rungs, each with the trials that the one before let go on.

    Args:
        trials: what :func:`trial_settings` made of a benchmark.
        plan: its runs.
        run_all: executes the teacher and the trials of a rung, and returns their records; a trial
            that failed has none. Its first argument is ``trials`` with the rungs so far, each with
            the trials that came so far.

    Returns:
        The scores of the last rung by trial; empty if no trial of some row had one in a rung.

    Raises:
        ConfigError: the evaluation does not give the measure.

    >>> from solo_ext.lab.experiments.plan import make_plan
    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> tuning = ["tuning.trials=4", "+tuning.rungs=[20]"]
    >>> trials = trial_settings(read_benchmark("digits", tuning), ["simclr"])
    >>> def run_all(so_far, rung):
    ...     print([run.row for run in rung], rung[0].config["max_epochs"])
    ...     scored = [(run.row, run.config["optimizer"]["lr"]) for run in rung]
    ...     return [{"row": row, "scores": {"lowshot_10_per_class": lr}} for row, lr in scored]
    >>> search(trials, make_plan(trials), run_all)
    ['simclr.0', 'simclr.1', 'simclr.3'] 20
    ['simclr.0', 'simclr.1'] 40
    {'simclr.0': 0.05799, 'simclr.1': 0.6392}
    """
    measure = _tuning(trials).measure
    scores = dict.fromkeys((run.row for run in plan if run.kind != "teacher"), 0.0)
    stages: dict[str, Stage] = {}
    for name, stage in trials.stages.items():
        alive = _best_trials(scores, measure) if stages else [*scores]
        stages[name] = stage.model_copy(update={"rows": alive})
        of_rung = [r for r in plan if r.kind == "teacher" or (r.budget == name and r.row in alive)]
        so_far, scores = trials.model_copy(update={"stages": dict(stages)}), {}
        for record in run_all(so_far, of_rung):
            if record["row"] in alive:
                scores[record["row"]] = _score(record, measure)
        if {_row_of(trial) for trial in scores} != {_row_of(trial) for trial in alive}:
            return {}
    return scores


def _score(record: Record, measure: str) -> float:
    if measure not in record["scores"]:
        listed = ", ".join(record["scores"])
        problem = "the evaluation does not give it"
        raise ConfigError("tuning.measure", measure, problem, f"allowed: {listed}")
    return record["scores"][measure]


def _best_trials(scores: Mapping[str, float], measure: str) -> list[str]:
    """The best of each row's trials, and the unchanged row, than which another must be better."""
    found = set()
    for of_row in _ranking(scores, measure):
        best = of_row[: math.ceil(_GOES_ON * len(of_row))]
        found |= {*best, *(t for t in of_row if t.endswith(".0"))}
    return [trial for trial in scores if trial in found]


def write_tuned(
    settings: BenchmarkSettings, trials: BenchmarkSettings, scores: Mapping[str, float], out: Path
) -> Path:
    """Writes ``tuned.yaml``: the benchmark with the settings of each row's best trial.

    Among equal trials the first is taken, so that a row changes only for a better score.

    Args:
        settings: the benchmark that is tuned.
        trials: what :func:`trial_settings` made of it.
        scores: what :func:`search` returned.
        out: folder of the file.

    >>> import tempfile
    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> settings = read_benchmark("digits")
    >>> trials = trial_settings(settings, ["simclr"])
    >>> scores = {"simclr.0": 90.0, "simclr.1": 91.0}
    >>> write_tuned(settings, trials, scores, Path(tempfile.mkdtemp())).name
    'tuned.yaml'
    """
    tuned = dict(settings.rows)
    for best, *_ in _ranking(scores, _tuning(settings).measure):
        name = _row_of(best)
        changes = trials.rows[best].changes
        tuned[name] = settings.rows[name].model_copy(update={"changes": changes})
    of_best = settings.model_copy(
        update={"title": f"{settings.title}, tuned", "rows": tuned, "tuning": None}
    )
    file = out / "tuned.yaml"
    text = yaml.safe_dump(of_best.model_dump(exclude_defaults=True), sort_keys=False)
    write_text(file, text)
    return file


def _lower_is_better(measure: str) -> bool:
    """Whether the lowest score wins, as its protocol says; refuses one of which neither does."""
    names = [name for name in PROTOCOLS if measure == name or measure.startswith(f"{name}_")]
    protocol = max(names, key=len)
    direction = PROTOCOLS[protocol].not_higher.get(measure.removeprefix(f"{protocol}_"))
    if direction == "neither":
        problem = "neither its highest nor its lowest value is the best"
        raise ConfigError("tuning.measure", measure, problem, "take another score")
    return direction == "lower"


def _ranking(scores: Mapping[str, float], measure: str) -> list[list[str]]:
    """The trials of each row, the best first; equal ones stay in order."""
    sign, rows = 1 if _lower_is_better(measure) else -1, dict[str, list[str]]()
    for trial in sorted(scores, key=lambda trial: sign * scores[trial]):
        rows.setdefault(_row_of(trial), []).append(trial)
    return list(rows.values())


def _row_of(trial: str) -> str:
    return trial.rpartition(".")[0]


def _tuning(settings: BenchmarkSettings) -> Tuning:
    if settings.tuning is None:
        raise ConfigError("tuning", None, "the benchmark declares none", "write trials and space")
    return settings.tuning


def _draws(tuning: Tuning, name: str, row: Row) -> list[dict[str, Any]]:
    """Settings of every trial of a row; the first changes nothing."""
    space = tuning.space | row.space
    if not space:
        raise ConfigError("tuning.space", {}, f"nothing to tune of {name}", "name settings")
    # Draw a power of 2 of points: otherwise the sequence is not balanced.
    power = max(0, math.ceil(math.log2(max(tuning.trials - 1, 1))))
    points = qmc.Sobol(len(space), scramble=True, seed=0).random_base2(power)
    draws: list[dict[str, Any]] = [{}]
    for point in points[: tuning.trials - 1].tolist():
        pairs = zip(space.items(), point, strict=True)
        draws.append({key: _value(dimension, x) for (key, dimension), x in pairs})
    return draws


def _value(dimension: Dimension, x: float) -> Any:
    """The value for a point between 0 and 1; numbers have four significant digits."""
    if dimension.choices is not None:
        return dimension.choices[int(x * len(dimension.choices))]
    low, high = dimension.low, dimension.high
    assert low is not None
    assert high is not None
    value = low * (high / low) ** x if dimension.log else low + x * (high - low)
    return float(f"{value:.4g}")
