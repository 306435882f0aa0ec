"""Tunes every row with the same effort, scored on held-out training images."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from solo_ext.core.errors import ConfigError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.plan import composed
from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.settings import (
    BenchmarkSettings,
    DatasetEntry,
    Dimension,
    Row,
    Tuning,
)


def trial_settings(
    settings: BenchmarkSettings, rows: Sequence[str] | None = None
) -> BenchmarkSettings:
    """A benchmark whose rows are the trials, ``<row>.<number>``; number 0 is the unchanged row.

    Trial n of a row is the n-th point of a scrambled Sobol sequence, whatever earlier trials
    scored: trials can run side by side, and a stopped search continues unchanged. A trial whose
    config is that of an earlier one is left out.

    Raises:
        ConfigError: no section ``tuning``, several data sets or budgets, a row that does not train,
            a measure that the evaluation does not give, or no setting to tune.

    >>> from solo_ext.lab.experiments.settings import checked_benchmark
    >>> tuning = {"trials": 2, "space": {"optimizer.lr": {"choices": [0.1, 0.3]}}}
    >>> given = {"title": "mine", "datasets": {"digits": {}}, "rows": {"pcl": {"config": "pcl"}}}
    >>> list(trial_settings(checked_benchmark({**given, "tuning": tuning})).rows)
    ['pcl.0', 'pcl.1']
    """
    tuning = _tuning(settings)
    if len(settings.datasets) * len(settings.budgets) > 1:
        remedy = "tune them one by one, with overrides such as '~budgets.800'"
        names = list(settings.datasets)
        raise ConfigError("datasets", names, "tuning takes one data set and budget", remedy)
    trainable = [
        name
        for name, row in settings.rows.items()
        if row.baseline is None and name != settings.teacher
    ]
    (dataset,), (budget,) = settings.datasets, settings.budgets
    trials: dict[str, Row] = {}
    for name in rows or trainable:
        if name not in trainable:
            listed = ", ".join(trainable)
            raise ConfigError("--rows", name, "not a row to tune", f"allowed: {listed}")
        row, tried = settings.rows[name], list[dict[str, Any]]()
        for number, drawn in enumerate(_draws(tuning, name, row)):
            changes = [*row.changes, *(f"{key}={json.dumps(v)}" for key, v in drawn.items())]
            trial = Row(config=row.config, changes=changes)
            config = composed(settings, dataset, budget, trial)
            if config not in tried:
                tried.append(config)
                trials[f"{name}.{number}"] = trial
    if settings.teacher is not None:
        trials[settings.teacher] = settings.rows[settings.teacher]
    return settings.model_copy(
        update={
            "title": f"{settings.title}, tuning",
            "datasets": {
                name: DatasetEntry(changes=[*entry.changes, f"data.holdout={tuning.holdout}"])
                for name, entry in settings.datasets.items()
            },
            "seeds": [0],
            "rows": trials,
            "default_rows": [name for name in trials if name != settings.teacher],
            "hypotheses": {},
            "tuning": None,
        }
    )


def write_tuned(
    settings: BenchmarkSettings, trials: BenchmarkSettings, records: Sequence[Record], out: Path
) -> Path:
    """Writes ``tuned.yaml``: the benchmark with the settings of each row's best trial.

    Among equal trials the first is taken, so that a row changes only for a better score.

    >>> import tempfile
    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> settings = read_benchmark("digits")
    >>> trials = trial_settings(settings, ["simclr"])
    >>> scores = [{"row": name, "scores": {settings.tuning.measure: 90.0}} for name in trials.rows]
    >>> write_tuned(settings, trials, scores, Path(tempfile.mkdtemp())).name
    'tuned.yaml'
    """
    measure = _tuning(settings).measure
    scores = {record["row"]: record["scores"] for record in records}
    tuned, best = dict(settings.rows), dict[str, float]()
    for trial, row in trials.rows.items():
        name = trial.rpartition(".")[0]
        if trial == trials.teacher:
            continue
        if measure not in scores[trial]:
            listed = ", ".join(scores[trial])
            problem = "the evaluation does not give it"
            raise ConfigError("tuning.measure", measure, problem, f"allowed: {listed}")
        if name not in best or scores[trial][measure] > best[name]:
            best[name] = scores[trial][measure]
            tuned[name] = settings.rows[name].model_copy(update={"changes": row.changes})
    of_best = settings.model_copy(
        update={"title": f"{settings.title}, tuned", "rows": tuned, "tuning": None}
    )
    file = out / "tuned.yaml"
    text = yaml.safe_dump(of_best.model_dump(exclude_defaults=True), sort_keys=False)
    write_text(file, text)
    return file


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
