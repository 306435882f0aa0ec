"""Tuning: the draws, the hold-out, and what is made of the scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.core.errors import ConfigError
from solo_ext.lab.cli import benchmark
from solo_ext.lab.cli.main import main
from solo_ext.lab.experiments.plan import PlannedRun, make_plan
from solo_ext.lab.experiments.records import Record, read_records
from solo_ext.lab.experiments.settings import BenchmarkSettings, checked_benchmark, read_benchmark
from solo_ext.lab.experiments.tuning import search, trial_settings, write_tuned
from tests.lab.experiments.conftest import in_this_process

SPACE = {
    "optimizer.lr": {"low": 0.01, "high": 1.0, "log": True},
    "optimizer.weight_decay": {"choices": [1e-5, 1e-4]},
}


def without_warmup(tiny: dict[str, Any]) -> dict[str, Any]:
    tiny["datasets"]["digits"] += ["scheduler.warmup_epochs=0"]
    return tiny


def settings(tiny: dict[str, Any], **change: Any) -> BenchmarkSettings:
    tuning = {"trials": 5, "holdout": 0.25, "space": SPACE} | change
    return checked_benchmark(tiny | {"tuning": tuning})


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
    scores = dict.fromkeys(made.rows, 1.0) | {"simclr.3": 5.0, "simclr.4": 5.0}
    file = write_tuned(given, made, scores, tmp_path)
    tuned = read_benchmark(str(file))
    assert tuned.rows["simclr"].changes == made.rows["simclr.3"].changes
    assert tuned.rows["debiased"].changes == []
    assert tuned.rows["raw-pixels"] == given.rows["raw-pixels"]
    assert make_plan(tuned, ["simclr"])[0].config["optimizer"]["lr"] != 0.3


def test_a_rung_is_its_budget_with_fewer_epochs(tiny: dict[str, Any]) -> None:
    without_warmup(tiny)["budgets"] = {"long": ["max_epochs=9", "optimizer.weight_decay=0.5"]}
    space = {"optimizer.lr": SPACE["optimizer.lr"]}
    given = settings(tiny, trials=3, rungs=[2, 4], space=space)
    runs = make_plan(trial_settings(given, ["simclr"]))
    epochs = {run.budget: run.config["max_epochs"] for run in runs}
    assert list(epochs.items()) == [("2-epochs", 2), ("4-epochs", 4), ("long", 9)]
    assert len(runs) == 3 * 3
    assert {run.config["optimizer"]["weight_decay"] for run in runs} == {0.5}


def test_the_best_of_each_row_go_on(tiny: dict[str, Any]) -> None:
    """A row does not lose its trials to a better one; the unchanged row is always tried whole."""
    given = settings(without_warmup(tiny), rungs=[1, 2])
    trials = trial_settings(given)
    plan, asked = make_plan(trials), list[set[str]]()

    def run_all(so_far: BenchmarkSettings, rung: list[PlannedRun]) -> list[Any]:
        asked.append({run.row for run in rung})
        # What is recorded says which trials came how far.
        held = {name: set(stage.rows) for name, stage in so_far.stages.items()}
        assert held == dict(zip(trials.budgets, asked, strict=False))
        assert {run.budget for run in rung} == {list(held)[-1]}
        # Trials of simclr are all better; its last one fails, which decides nothing else.
        return [
            {"row": row, "scores": {"knn": float(row[-1]) + 10 * (row[0] == "s")}}
            for row in sorted(asked[-1])
            if row != "simclr.4"
        ]

    scores = search(trials, plan, run_all)
    # A quarter of four finished trials and of five, then of two and of three.
    best = {"simclr.0", "simclr.3", "debiased.0", "debiased.4"}
    assert asked == [set(trials.rows), best | {"debiased.3"}, best]
    assert max(scores, key=lambda trial: scores[trial]) == "simclr.3"
    assert scores.keys() == best


def test_a_row_without_a_finished_trial_ends_the_search(tiny: dict[str, Any]) -> None:
    given = settings(without_warmup(tiny), rungs=[1])
    trials, asked = trial_settings(given), list[int]()

    def run_all(_: BenchmarkSettings, rung: list[PlannedRun]) -> list[Any]:
        asked.append(len(rung))
        rows = [run.row for run in rung if run.row.startswith("simclr")]
        return [{"row": row, "scores": {"knn": 1.0}} for row in rows]

    assert search(trials, make_plan(trials), run_all) == {}
    assert asked == [10]


def test_what_cannot_be_tuned(tiny: dict[str, Any]) -> None:
    given = settings(tiny, measure="knn_of_another_kind")
    trials = trial_settings(given)
    assert {name.partition(".")[0] for name in trials.rows} == {"simclr", "debiased"}
    some: list[Any] = [{"row": "simclr.0", "scores": {"knn": 1.0}}]
    with pytest.raises(ConfigError, match="allowed: knn"):
        search(trials, make_plan(trials), lambda *_: some)
    with pytest.raises(ConfigError, match="not a row to tune"):
        trial_settings(given, ["raw-pixels"])
    with pytest.raises(ConfigError, match=r"tuning\.measure='linear'.*allowed: knn"):
        trial_settings(settings(tiny, measure="linear"), ["simclr"])
    without_warmup(tiny)
    for rungs in ([3], [2, 1], [1, 1]):
        with pytest.raises(ConfigError, match=r"tuning\.rungs.*do not ascend to the 3 epochs"):
            trial_settings(settings(tiny, rungs=rungs), ["simclr"])
    tiny["datasets"]["digits"] += ["scheduler.warmup_epochs=2"]
    with pytest.raises(ConfigError, match=r"tuning\.rungs=\[2\].*within the 2 epochs of warm-up"):
        trial_settings(settings(tiny, rungs=[2]), ["simclr"])
    tiny["datasets"]["digits"] += ["scheduler.name=none"]
    assert trial_settings(settings(tiny, rungs=[2]), ["simclr"])
    tiny["budgets"] = {"2-epochs": []}
    with pytest.raises(ConfigError, match=r"^budgets='2-epochs': a rung has this name"):
        trial_settings(settings(tiny, rungs=[2]), ["simclr"])
    tiny["budgets"] = {"a": [], "b": ["max_epochs=2"]}
    with pytest.raises(ConfigError, match="takes one data set and budget"):
        trial_settings(settings(tiny), ["simclr"])


VIEWS = {"samples": 40, "lidar_images": 20, "lidar_views": 2, "k": 3}


def test_scored_without_labels(
    tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By LiDAR of the held-out training images; no protocol that needs labels is run."""
    monkeypatch.setattr(benchmark, "LocalLauncher", lambda *_: in_this_process)
    tiny["evaluation"] = {"views": VIEWS}
    tiny["datasets"]["digits"] += ["max_epochs=1", "online_eval.every_n_epochs=0"]
    space = {"optimizer.lr": SPACE["optimizer.lr"]}
    tiny["tuning"] = {"trials": 2, "holdout": 0.25, "measure": "views_lidar", "space": space}
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(tiny))
    assert main(["benchmark", "tune", str(file), "--rows", "simclr", "--out", str(out)]) == 0
    scores = {r["row"]: r["scores"]["views_lidar"] for r in read_records(out)}
    assert set(scores) == {"simclr.0", "simclr.1"}
    best = max(scores, key=lambda row: scores[row])
    made = trial_settings(read_benchmark(str(file)), ["simclr"])
    tuned = read_benchmark(str(out / "tuned.yaml"))
    assert tuned.rows["simclr"].changes == made.rows[best].changes


def test_the_lowest_score_wins_where_lower_is_better(tmp_path: Path, tiny: dict[str, Any]) -> None:
    tiny["evaluation"] = {"views": VIEWS, "geometry": {}}
    for measure, best in (
        ("views_rankme", "simclr.3"),
        ("views_alignment", "simclr.2"),
        ("geometry_uniformity", "simclr.2"),
        ("geometry_effective_rank", "simclr.3"),
    ):
        given = settings(tiny, measure=measure)
        made = trial_settings(given, ["simclr"])
        scores = dict.fromkeys(made.rows, 0.0) | {"simclr.2": -5.0, "simclr.3": 5.0}
        tuned = read_benchmark(str(write_tuned(given, made, scores, tmp_path)))
        assert tuned.rows["simclr"].changes == made.rows[best].changes
    with pytest.raises(ConfigError, match=r"measure='views_alpha_req': neither its highest nor"):
        trial_settings(settings(tiny, measure="views_alpha_req"), ["simclr"])


def test_data_without_labels(tiny: dict[str, Any]) -> None:
    tiny["datasets"]["digits"] += ["data.no_labels=true", "data.val_path=null"]
    with pytest.raises(ConfigError, match=r"evaluates on labelled.*evaluation without labels"):
        make_plan(checked_benchmark(tiny), ["simclr"])


@pytest.mark.slow
def test_from_the_command_line(
    tmp_path: Path,
    tiny: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of four trials of an epoch the best one and the unchanged one train for three."""
    monkeypatch.setattr(benchmark, "LocalLauncher", lambda *_: in_this_process)
    tuning = {"trials": 4, "holdout": 0.25, "space": SPACE, "rungs": [1]}
    without_warmup(tiny)["datasets"]["digits"] += ["online_eval.every_n_epochs=0"]
    tiny |= {"tuning": tuning, "minutes": 5, "teacher": "teacher"}
    teacher = {"config": "teacher", "changes": ["method_kwargs.temperature=0.3"]}
    tiny["rows"] |= {"teacher": teacher, "seed": {"config": "seed"}}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny))
    out = tmp_path / "out"
    words = ["benchmark", "tune", str(file), "--rows", "simclr", "seed", "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0
    assert "13 runs: about 38 minutes of a core\n" in capsys.readouterr().err
    assert main(words) == 0
    assert read_benchmark(str(out / "tuned.yaml")).title == "tiny, tuned"
    rungs: dict[str, dict[str, Record]] = {"1-epochs": {}, "default": {}}
    for record in read_records(out):
        rungs[record["budget"]][record["row"]] = record
        # 280 training images but for a quarter.
        assert record["images"] == 210
        assert record["config"]["max_epochs"] == {"1-epochs": 1, "default": 3}[record["budget"]]

    def by_score(budget: str, row: str) -> list[str]:
        trials = [trial for trial in rungs[budget] if trial.startswith(row)]
        return sorted(trials, key=lambda trial: -rungs[budget][trial]["scores"]["knn"])

    for row in ("simclr", "seed"):
        first, last = by_score("1-epochs", row), by_score("default", row)
        assert sorted(first) == [f"{row}.{n}" for n in range(4)]
        assert set(last) == {first[0], f"{row}.0"}
        best = rungs["default"][last[0]]
        *_, tuned = make_plan(read_benchmark(str(out / "tuned.yaml")), [row])
        assert tuned.config["optimizer"]["lr"] == pytest.approx(best["config"]["optimizer"]["lr"])
        assert tuned.config["max_epochs"] == 3
    plans = [json.loads(plan.read_text()) for plan in out.glob("runs/*/planned.json")]
    assert {plan["teacher"] for plan in plans if plan["row"].startswith("seed")} == {
        path.name for path in out.glob("runs/digits-default-teacher-0-*")
    }
    assert main(["benchmark", "report", str(out)]) == 0
    report = (out / "report.md").read_text()
    assert "on held-out training images" in report
    assert "Missing runs" not in report
    # Other rows would take the place of these in tuned.yaml.
    assert main([*words[:3], "--rows", "debiased", "--out", str(out), "--dry-run"]) == 2
    assert "holds trials of other rows, such as seed.0; name these" in capsys.readouterr().err
    # Nothing is left to train, and the choice is the same.
    before, records = (out / "tuned.yaml").read_text(), len(read_records(out))
    assert main(words) == 0
    assert (out / "tuned.yaml").read_text() == before
    assert len(read_records(out)) == records
