"""The runs of a grid and their keys."""

import copy
import importlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from solo_ext import host
from solo_ext.config.check import check_run
from solo_ext.core.errors import ConfigError
from solo_ext.data.digits import digits_folder
from solo_ext.lab.experiments import plan as planning
from solo_ext.lab.experiments.plan import PlannedRun, make_plan
from solo_ext.lab.experiments.results import _differing_keys
from solo_ext.lab.experiments.settings import (
    BenchmarkSettings,
    checked_benchmark,
    read_benchmark,
    shipped_benchmarks,
)
from solo_ext.lab.experiments.verdicts import _not_isolated
from solo_ext.lab.training.run_dir import environment
from solo_ext.methods import METHODS
from tests.lab.experiments.report_records import record


def planned(tiny: dict[str, Any], *rows: str, **change: Any) -> list[PlannedRun]:
    return make_plan(checked_benchmark(tiny | change), rows or None)


def test_one_seed_of_everything_comes_first(tiny: dict[str, Any]) -> None:
    found = [(run.row, run.seed) for run in planned(tiny)]
    rows = list(tiny["rows"])
    assert found == [(row, 1) for row in rows] + [(row, 2) for row in rows]


def test_kinds_and_configs(tiny: dict[str, Any]) -> None:
    runs = {run.row: run for run in planned(tiny, seeds=[3])}
    kinds = ["host", "plugin", "baseline", "baseline"]
    assert {name: run.kind for name, run in runs.items()} == dict(
        zip(tiny["rows"], kinds, strict=True)
    )
    assert runs["debiased"].config["seed"] == 3
    assert runs["random-backbone"].config["method"] == "simclr"


@pytest.mark.slow
def test_a_key_is_of_what_decides_the_numbers(tiny: dict[str, Any]) -> None:
    def key(**change: Any) -> str:
        return planned(tiny, "simclr", **({"seeds": [1]} | change))[0].key

    first, changes = key(), tiny["datasets"]["digits"]

    def changed(*more: str) -> str:
        return key(datasets={"digits": [*changes, *more]})

    assert key() == key(title="another", about="text") == first
    assert changed("name=another", "checkpoint.keep_prev=true", "data.num_workers=2") == first
    others = [
        key(seeds=[2]),
        key(threads=2),
        key(evaluation={"knn": {"k": [7]}}),
        changed("optimizer.lr=0.1"),
        changed("method_kwargs.temperature=0.3"),
        changed("data.fraction=0.3"),
    ]
    assert len({first, *others}) == 7


def test_not_where_the_images_lie_but_which_they_are_is_part_of_a_key(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    def key(name: str, without: str = "") -> str:
        for split in ("train", "val"):
            for label in "0123456789":
                files = sorted((digits_folder(split) / label).iterdir())
                (tmp_path / name / split / label).mkdir(parents=True)
                for file in files[split == without : 3]:
                    shutil.copy(file, tmp_path / name / split / label)
        tiny["datasets"]["digits"] = [
            *(f"data.{split}_path={tmp_path}/{name}/{split}" for split in ("train", "val")),
            "optimizer.batch_size=8",
        ]
        return planned(tiny, "simclr", seeds=[1])[0].key

    assert key("a") == key("b")
    assert len({key("c"), key("d", "train"), key("e", "val")}) == 3


def test_devices_share_the_batch(tiny: dict[str, Any]) -> None:
    """A run on two is the run on one, but for the order of its sums."""
    settings = checked_benchmark(tiny | {"seeds": [1]})
    (alone,), (pair,) = (make_plan(settings, ["simclr"], devices=n) for n in (1, 2))
    assert alone.config["optimizer"]["batch_size"] == 2 * pair.config["optimizer"]["batch_size"]
    assert alone.config["optimizer"]["lr"] == pair.config["optimizer"]["lr"]
    assert pair.config["devices"] == "2"
    assert alone.key != pair.key
    (nodes,) = make_plan(settings, ["simclr"], devices=2, nodes=4)
    assert alone.config["optimizer"]["batch_size"] == 8 * nodes.config["optimizer"]["batch_size"]
    assert (nodes.config["devices"], nodes.config["num_nodes"]) == ("2", 4)
    assert "num_nodes" not in pair.config, "else its key would have changed"
    with pytest.raises(ConfigError, match="cannot be shared out evenly"):
        make_plan(settings, devices=7)
    with pytest.raises(ConfigError, match=r"--devices \* --nodes=6: the batch of 64"):
        make_plan(settings, devices=2, nodes=3)


def test_budgets_that_are_one_run(tiny: dict[str, Any]) -> None:
    tiny["budgets"] = {"three": [], "also": ["max_epochs=3"]}
    with pytest.raises(ConfigError, match=r"^budgets=\['three', 'also'\]: are the same run"):
        make_plan(checked_benchmark(tiny))


def test_rows_that_are_one_run(tiny: dict[str, Any]) -> None:
    tiny["rows"]["again"] = tiny["rows"]["simclr"]
    with pytest.raises(ConfigError, match=r"^rows=\['simclr', 'again'\]: are the same run"):
        planned(tiny)


def test_teachers_come_first_and_are_part_of_the_key(tiny: dict[str, Any]) -> None:
    tiny["rows"] |= {"teacher": {"config": "teacher"}, "seed": {"config": "seed"}}
    runs = planned(tiny, "seed", "simclr", teacher="teacher")
    assert [run.row for run in runs] == ["teacher", "simclr", "seed", "simclr", "seed"]
    teacher, plain, student = runs[:3]
    assert (teacher.kind, teacher.seed) == ("teacher", 0)
    assert (student.teacher, plain.teacher) == (teacher.folder, None)
    settings = checked_benchmark(tiny | {"teacher": "teacher"})
    assert {run.row for run in make_plan(settings, ["simclr"])} == {"simclr"}
    assert {run.row for run in make_plan(settings, ["teacher"])} == {"teacher"}
    tiny["rows"]["teacher"]["changes"] = ["optimizer.lr=0.1"]
    again = planned(tiny, "seed", "simclr", teacher="teacher")
    assert again[0].key != teacher.key
    assert again[1].key == plain.key
    assert again[2].key != student.key


def test_a_row_may_name_a_teacher_of_its_own(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Its file's digest is part of the key, and not where it lies."""
    torch.manual_seed(0)
    network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)

    def key(file: str) -> tuple[str | None, str]:
        save_file(network.state_dict(), tmp_path / file)
        kwargs = "layout: timm, model: resnet10t, model_kwargs: {channels: [8, 8, 8, 8]}"
        own = f"method_kwargs.teacher={{{kwargs}, path: {tmp_path / file}}}"
        rows = {"teacher": {"config": "teacher"}, "own": {"config": "seed", "changes": [own]}}
        change = {"rows": {**tiny["rows"], **rows}, "seeds": [1]}
        (found,) = planned(tiny, "own", teacher="teacher", **change)
        return found.teacher, found.key

    first = key("a.safetensors")
    assert first[0] is None
    assert key("b.safetensors") == first
    torch.nn.init.ones_(network.conv1[0].weight)
    assert key("c.safetensors") != first


def test_students_are_checked_before_their_teacher_trains(tiny: dict[str, Any]) -> None:
    changes = ["+method_kwargs.queue_sise=64"]
    tiny["rows"] = {
        "teacher": {"config": "teacher"},
        "seed": {"config": "seed", "changes": changes},
    }
    with pytest.raises(ConfigError, match="queue_sise=64: unknown key; did you mean 'queue_size'"):
        planned(tiny, teacher="teacher")


def test_a_baseline_has_the_backbone_of_the_rows_not_of_the_teacher(tiny: dict[str, Any]) -> None:
    tiny["datasets"]["digits"] = ["max_epochs=1"]
    tiny["rows"] = {"teacher": {"config": "teacher"}, **tiny["rows"]}
    runs = {run.row: run for run in planned(tiny, teacher="teacher")}
    widths = {n: r.config["backbone"]["kwargs"]["channels"][0] for n, r in runs.items()}
    assert widths["random-backbone"] == widths["simclr"] != widths["teacher"]


FEW = ("digits", "demo", "cifar10", "claims_e1")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in shipped_benchmarks()],
)
def test_shipped_benchmarks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their data; that of digits is there, and so is the last check of a config."""
    if name != "digits":
        monkeypatch.setattr(planning, "prepare", check_run)
        monkeypatch.setattr(planning, "_images", lambda data: [data])
        monkeypatch.setattr(planning, "_teacher_digest", lambda section: section)
    settings = read_benchmark(name, ["seeds=[1]"])
    runs = make_plan(settings, list(settings.rows))
    assert settings.title == name
    assert len({run.key for run in runs}) == len(runs)
    assert {run.row for run in runs} == set(settings.rows)
    assert_claims_isolate_what_they_say(settings, runs)
    if not name.startswith(("claims", "cpu_", "imagenet-distillation")):
        # The claims of the others say by themselves what differs.
        assert_rows_are_on_equal_terms(settings, runs)
    for run in runs:
        if settings.tuning is not None and run.kind in ("host", "plugin"):
            rate = (settings.tuning.space | settings.rows[run.row].space)["optimizer.lr"]
            low, high = rate.low or math.inf, rate.high or 0
            assert low <= run.config["optimizer"]["lr"] <= high, f"{run.row}'s own rate"
    if name == "imagenet-distillation":
        assert_rows_of_the_protoseed_paper({run.row: run.config["max_epochs"] for run in runs})


def assert_rows_of_the_protoseed_paper(found: dict[str, int]) -> None:
    """Its students by name: 100 epochs, SEED beside them 200 and 100 (tables 1, 2 and 4)."""
    ours = [row for row in found if row.startswith("protoseed_")]
    assert len(ours) == 8
    assert {found[row] for row in [*ours, "resnet18_dino"]} == {100}
    for teacher in ("moco_v2", "swav"):
        assert [found[f"seed_{teacher}"], found[f"seed_{teacher}_100"]] == [200, 100]
    assert found["seed_swav_multicrop"] == 200


def assert_claims_isolate_what_they_say(
    settings: BenchmarkSettings, runs: list[PlannedRun]
) -> None:
    """The rows of a claim differ in nothing else, and in each key or section that it names."""
    for name, claim in settings.hypotheses.items():
        assert claim.measure in (settings.headline or ()), "a number that the table does not show"
        assert claim.base in settings.rows[claim.row].bases
        if claim.isolates is None:
            assert not settings.title.startswith("claims"), name
            continue
        places = {(run.dataset, run.budget) for run in runs if run.row == claim.row}
        assert places
        for place in places:
            held = {r.row: r.config for r in runs if (r.dataset, r.budget) == place}
            if claim.base not in held:
                # Stages need not have both rows at every budget.
                assert settings.stages
                continue
            keys = _differing_keys(held[claim.row], held[claim.base])
            assert _not_isolated(keys, claim.isolates) == [], name
            # Where images are held changes no number, so that it does not count as a difference.
            alike = "data.num_", "data.in_memory"
            named = [own for own in claim.isolates if not own.startswith(alike)]
            if settings.tuning is not None:
                # Keys that tuning changes differ when it has been done; of a queue, momentum too.
                tuned = [*settings.tuning.space, *settings.rows[claim.row].space, "momentum"]
                named = [own for own in named if _not_isolated(tuned, [own]) == tuned]
            assert [own for own in named if _not_isolated(keys, [own]) == keys] == [], name


def assert_rows_are_on_equal_terms(settings: BenchmarkSettings, runs: list[PlannedRun]) -> None:
    """Images, crops, backbone, batch and epochs; students see one of the crops."""
    terms: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        if run.kind != "teacher":
            config = run.config
            crops = [{**a, "num_crops": None} for a in config["augmentations"]]
            batch = config["optimizer"]["batch_size"]
            shared = [config[key] for key in ("data", "backbone", "max_epochs", "precision")]
            found = json.dumps([crops, batch, *shared], sort_keys=True)
            terms.setdefault((run.dataset, run.budget), set()).add(found)
    assert [len(found) for found in terms.values()] == [1] * len(terms)


def test_a_key_is_of_the_code_of_another_packages_method(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that were added after an edit would be compared with those before it."""
    code = tmp_path / "theirs.py"
    code.write_text("class Theirs:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = importlib.import_module("theirs").Theirs
    theirs = replace(METHODS["debiased"], target=target, origin="theirs")

    def keys() -> dict[str, str]:
        return {run.row: run.key for run in planned(tiny, "simclr", "debiased", seeds=[1])}

    ours = keys()
    monkeypatch.setitem(METHODS, "debiased", theirs)
    # Where it is registered; taken away again with it.
    monkeypatch.setitem(host.load().methods, "theirs/debiased", target)
    first = keys()
    assert environment()["packages"]["theirs"].startswith("of no version (")
    code.write_text(code.read_text().replace("pass", "weight = 0.3"))
    second = keys()
    assert len({found["debiased"] for found in (ours, first, second)}) == 3
    assert ours["simclr"] == first["simclr"] == second["simclr"]


def staged(tiny: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Two budgets and three stages, the last of rows near their base."""
    tiny["budgets"] = {"short": ["max_epochs=1"], "long": ["max_epochs=2"]}
    tiny["headline"] = ["knn"]
    tiny["rows"]["barlow"] = {"config": "barlow_twins", "bases": ["simclr"]}
    rows = ["debiased", "simclr", "barlow"]
    tiny["stages"] = {
        "first": {"budget": "short", "rows": rows, "seeds": [1], "minutes": 2.0},
        "second": {"budget": "long", "rows": ["simclr"], "seeds": [2, 1]},
        "third": {"budget": "short", "rows": rows, "seeds": [1, 2], "near": 1.0},
    }
    return tiny | change


def test_stages_in_their_order_each_run_once(tiny: dict[str, Any]) -> None:
    settings = checked_benchmark(staged(tiny))
    plan = make_plan(settings)
    cells = [(r.budget, r.row, r.seed) for r in plan]
    first = [("short", row, 1) for row in ("debiased", "simclr", "barlow")]
    assert cells == [*first, ("long", "simclr", 2), ("long", "simclr", 1)]
    assert [run.minutes for run in plan] == [2.0] * 3 + [None] * 2
    (only,) = make_plan(settings, ["debiased"])
    assert only.row == "debiased"
    assert {r.budget for r in make_plan(settings, stages=["second"])} == {"long"}
    assert {r.seed for r in make_plan(checked_benchmark(staged(tiny, seeds=[1])))} == {1}
    whole = {run.key for run in make_plan(checked_benchmark(staged(tiny, stages={})))}
    assert {run.key for run in plan} < whole


@pytest.mark.parametrize(
    ("scores", "rows"),
    [
        ({"simclr": 50.0, "debiased": 50.9, "barlow": 48.9}, ["simclr", "debiased"]),
        ({"simclr": 50.0, "debiased": 51.1, "barlow": 49.0}, ["simclr", "barlow"]),
        ({"simclr": 50.0, "debiased": 70.0}, []),
        ({"debiased": 50.0}, []),
        ({}, []),
    ],
)
def test_more_seeds_of_what_one_seed_cannot_tell_apart(
    tiny: dict[str, Any], scores: dict[str, float], rows: list[str]
) -> None:
    settings = checked_benchmark(staged(tiny))
    keys = {run.row: run.key for run in make_plan(settings, stages=["first"])}
    # By the digest, whatever name the row has in its record.
    records = [record("renamed", 1, knn, key=keys[row]) for row, knn in scores.items()]
    others = [record(row, 1, 0.0, budget="short") for row in scores]
    plan = make_plan(settings, stages=["third"], records=[*others, *records])
    assert [(r.row, r.seed) for r in plan] == [(row, seed) for seed in (1, 2) for row in rows]


def test_refused_stages(tiny: dict[str, Any]) -> None:
    for key, value, problem in (
        ("budget", "shrt", r"no such budget; did you mean 'short'"),
        ("teacher_budget", "x", "no such budget"),
        ("rows", ["simcl"], r"no such row; did you mean 'simclr'"),
    ):
        given = staged(copy.deepcopy(tiny))
        given["stages"]["first"][key] = value
        with pytest.raises(ConfigError, match=rf"^stages\.first\.{key}=.*{problem}"):
            checked_benchmark(given)
    without = staged(copy.deepcopy(tiny))
    del without["headline"]
    with pytest.raises(ConfigError, match=r"^stages\.third\.near=1\.0: rows are compared by the"):
        checked_benchmark(without)
    settings = checked_benchmark(staged(copy.deepcopy(tiny)))
    with pytest.raises(ConfigError, match=r"^--stages='frst': no such stage; did you mean 'first'"):
        make_plan(settings, stages=["frst"])
    with pytest.raises(ConfigError, match="no such stage; leave it out"):
        make_plan(checked_benchmark(tiny), stages=["first"])


def test_weights_that_runs_start_from_are_part_of_the_key(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """By the digest of their file, wherever it lies; null is as without the setting."""
    changes = tiny["datasets"]["digits"]

    def key(weights: str) -> str:
        tiny["datasets"]["digits"] = [*changes, f"backbone.weights={weights}"]
        return planned(tiny, "simclr", seeds=[1])[0].key

    without = planned(tiny, "simclr", seeds=[1])[0].key
    for name, value in (("a.pth", 0.0), ("c.pth", 1.0)):
        torch.save({"layer1.0.conv1.weight": torch.tensor([value])}, tmp_path / name)
    shutil.copy(tmp_path / "a.pth", tmp_path / "b.pth")
    first = key(f"{tmp_path}/a.pth")
    assert key("null") == without != first
    assert key(f"{tmp_path}/b.pth") == first
    assert key(f"{tmp_path}/c.pth") not in (first, without)
    with pytest.raises(ConfigError, match=r"^backbone.weights='nowhere': no such file or folder"):
        key("nowhere")
