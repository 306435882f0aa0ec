"""Tuning: the draws, the hold-out, and what is made of the scores."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.core.errors import ConfigError
from solo_ext.lab.cli import benchmark
from solo_ext.lab.experiments.plan import make_plan
from solo_ext.lab.experiments.records import read_records
from solo_ext.lab.experiments.settings import BenchmarkSettings, checked_benchmark, read_benchmark
from solo_ext.lab.experiments.tuning import trial_settings, write_tuned
from tests.lab.experiments.conftest import in_this_process

SPACE = {
    "optimizer.lr": {"low": 0.01, "high": 1.0, "log": True},
    "optimizer.weight_decay": {"choices": [1e-5, 1e-4]},
}


def settings(tiny: dict[str, Any], **change: Any) -> BenchmarkSettings:
    tuning = {"trials": 5, "holdout": 0.25, "space": SPACE} | change
    return checked_benchmark(tiny | {"tuning": tuning})


def scored(trials: BenchmarkSettings, scores: dict[str, float]) -> Any:
    return [{"row": row, "scores": {"knn": scores.get(row, 1.0)}} for row in trials.rows]


def test_trials_of_a_row(tiny: dict[str, Any]) -> None:
    made = trial_settings(settings(tiny), ["simclr", "debiased"])
    assert list(made.rows) == [f"{r}.{n}" for r in ("simclr", "debiased") for n in range(5)]
    assert made.rows["simclr.0"].changes == []
    drawn = [made.rows[f"simclr.{n}"].changes for n in range(1, 5)]
    assert len({tuple(d) for d in drawn}) == 4
    # The same settings for all: no row is luckier than another.
    assert drawn == [made.rows[f"debiased.{n}"].changes for n in range(1, 5)]
    rates = [float(d[0].partition("=")[2]) for d in drawn]
    assert all(0.01 <= rate <= 1 for rate in rates)
    assert made == trial_settings(settings(tiny), ["simclr", "debiased"])


def test_a_trial_that_repeats_another_is_left_out(tiny: dict[str, Any]) -> None:
    """Of two choices, one of which is the row's own."""
    space = {"optimizer.weight_decay": {"choices": [1e-5, 1e-3]}}
    tiny["rows"]["simclr"]["changes"] = ["optimizer.weight_decay=0.00001"]
    made = trial_settings(settings(tiny, space=space), ["simclr"])
    assert len(made.rows) == 2
    assert "simclr.0" in made.rows
    assert len(make_plan(made)) == 2


def test_logarithmic_draws_cover_their_range(tiny: dict[str, Any]) -> None:
    tiny["rows"]["simclr"]["space"] = {"method_kwargs.temperature": {"low": 0.1, "high": 0.2}}
    made = trial_settings(settings(tiny, trials=65), ["simclr"])
    assert len(made.rows["simclr.1"].changes) == 3
    rates = [float(made.rows[f"simclr.{n}"].changes[0].partition("=")[2]) for n in range(1, 65)]
    assert 24 <= sum(rate < 0.1 for rate in rates) <= 40


def test_trials_are_scored_on_held_out_training_images(tiny: dict[str, Any]) -> None:
    runs = make_plan(trial_settings(settings(tiny, trials=2), ["simclr"]))
    assert {run.seed for run in runs} == {0}
    assert all(run.config["data"]["holdout"] == 0.25 for run in runs)


def test_the_best_trial_is_taken(tmp_path: Path, tiny: dict[str, Any]) -> None:
    given = settings(tiny)
    made = trial_settings(given, ["simclr", "debiased"])
    scores = {"simclr.3": 5.0, "simclr.4": 5.0, "debiased.0": 1.0}
    file = write_tuned(given, made, scored(made, scores), tmp_path)
    tuned = read_benchmark(str(file))
    assert tuned.rows["simclr"].changes == made.rows["simclr.3"].changes
    assert tuned.rows["debiased"].changes == []
    assert tuned.rows["raw-pixels"] == given.rows["raw-pixels"]
    assert make_plan(tuned)[0].config["optimizer"]["lr"] != 0.3


def test_what_cannot_be_tuned(tiny: dict[str, Any]) -> None:
    given = settings(tiny, measure="knn_of_another_kind")
    trials = trial_settings(given)
    assert {name.partition(".")[0] for name in trials.rows} == {"simclr", "debiased"}
    with pytest.raises(ConfigError, match="allowed: knn"):
        write_tuned(given, trials, scored(trials, {}), Path())
    with pytest.raises(ConfigError, match="not a row to tune"):
        trial_settings(given, ["raw-pixels"])
    with pytest.raises(ConfigError, match=r"tuning\.measure='linear'.*allowed: knn"):
        trial_settings(settings(tiny, measure="linear"), ["simclr"])
    tiny["budgets"] = {"a": [], "b": ["max_epochs=2"]}
    with pytest.raises(ConfigError, match="takes one data set and budget"):
        trial_settings(settings(tiny), ["simclr"])


@pytest.mark.slow
def test_from_the_command_line(
    tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from solo_ext.lab.cli.main import main

    monkeypatch.setattr(benchmark, "LocalLauncher", lambda *_: in_this_process)
    file = tmp_path / "tiny.yaml"
    tuning = {"trials": 2, "holdout": 0.25, "space": SPACE}
    file.write_text(yaml.safe_dump(tiny | {"tuning": tuning}))
    out = tmp_path / "out"
    words = ["benchmark", "tune", str(file), "--rows", "simclr", "--out", str(out)]
    assert main(words) == 0
    assert read_benchmark(str(out / "tuned.yaml")).title == "tiny, tuned"
    records = {r["row"]: r for r in read_records(out)}
    # 280 training images but for a quarter.
    assert [records[f"simclr.{n}"]["images"] for n in range(2)] == [210, 210]
    rates = {row: record["config"]["optimizer"]["lr"] for row, record in records.items()}
    best = max(records, key=lambda row: records[row]["scores"]["knn"])
    assert make_plan(read_benchmark(str(out / "tuned.yaml")), ["simclr"])[0].config["optimizer"][
        "lr"
    ] == pytest.approx(rates[best])
