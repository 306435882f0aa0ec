"""A grid from nothing to its records, in processes as users start them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from solo_ext import __version__
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.lab.cli import benchmark
from solo_ext.lab.cli.main import main
from solo_ext.lab.experiments import records as recording
from solo_ext.lab.experiments.launchers import LocalLauncher, SlurmLauncher
from solo_ext.lab.experiments.pace import _SAVING
from solo_ext.lab.experiments.plan import PlannedRun, make_plan
from solo_ext.lab.experiments.records import UNFINISHED, code_version, read_records
from solo_ext.lab.experiments.report import write_report
from solo_ext.lab.experiments.results import read_results
from solo_ext.lab.experiments.run import LOCK, run_benchmark
from solo_ext.lab.experiments.settings import checked_benchmark
from solo_ext.lab.experiments.work import CODE, RECORD
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import EPOCHS, METRICS, checkpoints
from tests import forks
from tests.attack.world import settings as tiny_run
from tests.conftest import json_lines, made_images
from tests.lab.experiments.conftest import TINY, in_this_process
from tests.lab.training.resumable import KillAt


def start(settings: dict[str, Any], folder: Path, *words: str) -> forks.Fork:
    """``solo-ext benchmark run`` with these settings, into the folder ``out``."""
    (folder / "mine.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    given = ("benchmark", "run", folder / "mine.yaml", "--out", folder / "out", "--parallel", "2")
    return forks.start(*forks.SOLO_EXT, *given, *words)


def numbers(out: Path) -> dict[str, Any]:
    """What must not depend on when and how often a grid was stopped."""
    own = ("row", "seed", "scores", "epochs", "images", "config", "evaluation")
    return {
        r["key"]: {k: r[k] for k in own}  # type: ignore[literal-required]
        | {"curves": r["curves"] and (r["curves"]["epochs"], r["curves"]["scores"])}
        for r in read_records(out)
    }


FOUR = ("--rows", "debiased", "random-backbone")
"""Of each seed two runs."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file and the folder of a grid that nobody stopped."""
    folder = tmp_path_factory.mktemp("grid")
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY, sort_keys=False))
    words = [sys.executable, *forks.SOLO_EXT, "benchmark", "run", file, "--out", folder / "out"]
    subprocess.run([*words, *FOUR], check=True)
    return file, folder / "out"


@pytest.mark.slow
def test_records_of_a_grid(uninterrupted: tuple[Path, Path]) -> None:
    records: dict[tuple[str, int], Any]
    records = {(r["row"], r["seed"]): r for r in read_records(uninterrupted[1])}
    rows = ("debiased", "random-backbone")
    assert set(records) == {(row, seed) for row in rows for seed in (1, 2)}
    trained = records["debiased", 1]
    assert trained["epochs"] == 3
    assert trained["images"] == 280
    assert trained["seconds"] > 0
    assert trained["memory"]["resident"] > 1e8
    assert trained["curves"]["epochs"] == [0, 2, 3]
    assert trained["curves"]["seconds"][0] == 0
    assert trained["curves"]["seconds"][-1] == pytest.approx(trained["seconds"], abs=0.01)
    # k = 5 there, the default ks online.
    assert set(trained["scores"]) == {"knn"}
    assert set(trained["curves"]["scores"]) == {"knn", "knn_200"}
    assert trained["environment"]["torch_threads"] == 1
    untrained = records["random-backbone", 1]
    assert untrained["scores"] != records["random-backbone", 2]["scores"]
    assert untrained["seconds"] is None
    assert untrained["memory"] is None
    assert untrained["epochs"] == 0
    assert str(uninterrupted[1].parent) not in json.dumps(list(records.values()))


@pytest.mark.slow
def test_a_finished_grid_runs_nothing(
    uninterrupted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = uninterrupted
    held = (out / "records.jsonl").read_bytes()
    assert main(["benchmark", "run", str(file), "--out", str(out), "--json", *FOUR]) == 0
    said = capsys.readouterr()
    assert "4 of 4 runs were finished before" in said.err
    assert (out / "records.jsonl").read_bytes() == held
    pages = [str(out / f"report.{kind}") for kind in ("md", "html")]
    counts = {"out": str(out), "records": 4, "runs": 4, "failed": []}
    assert json.loads(said.out) == {**counts, "written": pages}
    assert all(Path(page).is_file() for page in pages)


def test_a_failed_run_is_said(
    tmp_path: Path,
    tiny_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(folders: list[Path], *_: Any) -> dict[Path, str]:
        return {folders[0]: "out of memory"}

    monkeypatch.setattr(benchmark, "LocalLauncher", lambda *_: fails)
    words = ["benchmark", "run", str(tiny_file), "--out", str(tmp_path), "--rows", "raw-pixels"]
    assert main([*words, "--dry-run", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)["runs"]
    assert main(words) == 1
    assert f"failed  {first}: out of memory" in capsys.readouterr().err


def run_here(given: dict[str, Any], out: Path, *rows: str) -> None:
    settings = checked_benchmark(given)
    run_benchmark(settings, make_plan(settings, rows or None), out, in_this_process)


@pytest.mark.parametrize("text", ["", "[1, 2]"])
def test_a_folder_with_no_settings_in_their_file(
    text: str, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    (tmp_path / "benchmark.yaml").write_text(text)
    with pytest.raises(UserError, match=r"no benchmark.yaml with settings in it"):
        run_here(tiny, tmp_path)


def test_a_folder_with_other_settings_is_named(tmp_path: Path, tiny: dict[str, Any]) -> None:
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(tiny | {"no_such": 1}))
    with pytest.raises(UserError, match=r"benchmark\.yaml': no_such=1: unknown key"):
        run_here(tiny, tmp_path)


def test_runs_that_end_together_are_counted_one_by_one(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    settings, said = checked_benchmark(tiny), list[str]()
    plan = make_plan(settings, ["raw-pixels"])
    run_benchmark(settings, plan, tmp_path, in_this_process, said.append)
    assert [line.split()[0] for line in said] == ["1/2", "2/2"]


def test_no_run_is_said(
    tmp_path: Path, tiny_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = "+stages.one={budget: default, rows: [simclr], seeds: [7]}"
    assert main(["benchmark", "run", str(tiny_file), stage, "--out", str(tmp_path / "out")]) == 0
    assert "no run: no stage has these rows and seeds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(("number", "to_all"), [("SIGINT", True), ("SIGTERM", False)])
def test_told_to_end_in_the_first_epoch(
    number: str, to_all: bool, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    """Twice, as an impatient user does: what is at work saves, and the next call goes on."""
    out = tmp_path / "out"
    # An epoch that is not over before the signals come.
    slow = ["optimizer.batch_size=8", "log_every_n_steps=1", "backbone.kwargs.stem_width=32"]
    tiny["datasets"]["digits"] += slow
    process = start(tiny | {"seeds": [1]}, tmp_path, "--rows", "debiased")

    def trains() -> bool:
        # Evaluations come before the first step.
        return any('"train_' in f.read_text() for f in out.glob(f"runs/*/{METRICS}"))

    while not trains():
        assert process.poll() is None
        time.sleep(0.002)
    for _ in range(2):
        (os.killpg if to_all else os.kill)(process.pid, signal.Signals[number])
        time.sleep(0.1)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.Signals[number], shown
    line = f"solo-ext: stopped by {number}; what is finished stays, and the same command goes on"
    assert shown.splitlines()[-1] == line
    assert "Traceback" not in shown
    (run_dir,) = out.glob("runs/*/")
    (saved,) = checkpoints(run_dir)
    assert (saved.epoch, saved.step is None) == (0, False)
    assert "Traceback" not in (run_dir / "work.log").read_text()


@pytest.mark.slow
@pytest.mark.fault
def test_killed_it_ends_alike(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Two runs side by side; kill -9 of the command alone, at a random moment of trainings.

    What it started ends by itself, and what was trained is not trained again by the next call.
    """
    whole, out = tmp_path / "whole", tmp_path / "out"
    tiny["datasets"]["digits"].append("max_epochs=5")
    tiny |= {"seeds": [1]}
    rows = "simclr", "debiased"
    run_here(tiny, whole, *rows)
    seed = random.randrange(2**32)
    print(f"moment drawn from seed {seed}")

    def trained() -> int:
        return sum(len(read_jsonl(f)) for f in out.glob("runs/*/epochs.jsonl"))

    moment = random.Random(seed)
    epochs = moment.randint(1, 5)
    process = start(tiny, tmp_path, "--rows", *rows)
    while trained() < epochs and process.poll() is None:
        time.sleep(0.002)
    # An epoch takes a tenth of a second; five are left, and their evaluations.
    time.sleep(moment.uniform(0, 0.2))
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    run_here(tiny, out, *rows)
    assert len(numbers(out)) == 2
    assert numbers(out) == numbers(whole)
    # At most the epochs at hand, two side by side, are repeated.
    assert trained() <= 2 * 5 + 2


@pytest.mark.slow
@pytest.mark.fault
def test_a_teacher_whose_run_directory_is_gone_is_trained_again(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    """As where records were copied from elsewhere to go on with them."""
    tiny["rows"] = {"teacher": {"config": "simclr"}, "seed": {"config": "seed"}}
    tiny |= {"teacher": "teacher", "seeds": [1]}
    tiny["datasets"]["digits"].append("max_epochs=1")
    run_here(tiny, tmp_path)
    first = numbers(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    run_here(tiny | {"seeds": [1, 2]}, tmp_path)
    assert len(numbers(tmp_path)) == 3
    assert {key: numbers(tmp_path)[key] for key in first} == first


@pytest.mark.parametrize("lost", [0, 1])
def test_seconds_of_a_run_that_was_resumed_by_hand(
    lost: int, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    """Those of ``solo-ext pretrain`` count; without the times of an epoch, nothing is told."""
    settings = checked_benchmark(tiny | {"seeds": [1]})
    (run,) = plan = make_plan(settings, ["debiased"])
    folder = tmp_path / "runs" / run.folder
    with pytest.raises(RuntimeError, match="killed"):
        pretrain(
            prepare(run.config),
            run_dir=folder,
            callbacks=[KillAt(2 * 280 // 64)],
            show_progress=False,
        )
    # `solo-ext pretrain` of earlier versions has timed no epoch.
    before = json_lines(folder / EPOCHS)[lost:]
    (folder / EPOCHS).unlink()
    append_lines(folder / EPOCHS, before)
    (record,), _ = run_benchmark(settings, plan, tmp_path, in_this_process)
    assert record["epochs"] == 3
    assert record["scores"]
    if lost:
        assert record["seconds"] is record["images_per_second"] is record["curves"] is None
        return
    lines = json_lines(folder / EPOCHS)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert record["seconds"] == pytest.approx(sum(line["seconds"] for line in lines), abs=1e-3)
    assert record["images_per_second"] == pytest.approx(3 * 256 / record["seconds"], rel=1e-2)
    assert record["curves"] is not None
    assert record["curves"]["seconds"][-1] == record["seconds"]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("lost", ["*.ckpt", "record.json"])
def test_no_student_of_an_unfinished_teacher(
    lost: str, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    """Of one whose weights were deleted, or whom a stopped call had begun to train again."""
    tiny["rows"] = {"teacher": {"config": "simclr"}, "seed": {"config": "seed"}}
    tiny |= {"teacher": "teacher", "seeds": [1]}
    tiny["datasets"]["digits"].append("max_epochs=1")
    run_here(tiny, tmp_path, "teacher")
    (folder,) = (tmp_path / "runs").iterdir()
    for file in folder.glob(lost):
        file.unlink()
    started: list[str] = []

    def launcher(folders: Sequence[Path], tick: Callable[[], None]) -> dict[Path, str]:
        started.extend(f.name for f in folders)
        return in_this_process(folders, tick)

    settings = checked_benchmark(tiny)
    run_benchmark(settings, make_plan(settings), tmp_path, launcher)
    assert started[0] == folder.name
    assert len(started) == len(numbers(tmp_path)) == 2


@pytest.mark.slow
def test_other_seeds_take_none_away(tmp_path: Path, tiny: dict[str, Any]) -> None:
    for seed in (1, 2):
        run_here(tiny | {"seeds": [seed]}, tmp_path, "raw-pixels")
    assert yaml.safe_load((tmp_path / "benchmark.yaml").read_text())["seeds"] == [1, 2]
    assert len(numbers(tmp_path)) == 2


@pytest.mark.fault
def test_folders_that_cannot_be_taken(tmp_path: Path, tiny: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="name a folder that can be written"):
        run_here(tiny, tmp_path / "file")
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(tiny | {"title": "another"}))
    with pytest.raises(UserError, match="holds the benchmark 'another', not 'tiny'"):
        run_here(tiny, tmp_path)


def test_two_calls_at_once(
    tmp_path: Path, tiny_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / LOCK, 0):
        assert main(["benchmark", "run", str(tiny_file), "--out", str(tmp_path)]) == 2
    assert "is being written by another process" in capsys.readouterr().err
    with locked(tmp_path / LOCK, 0):
        pass


@pytest.mark.slow
def test_a_run_of_two_processes(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Lightning starts the second one; it trains along and leaves the rest to the first."""
    tiny["datasets"]["digits"] += ["strategy=ddp", "max_epochs=2"]
    process = start(tiny | {"seeds": [1]}, tmp_path, "--rows", "debiased", "--devices", "2")
    _, shown = process.communicate()
    assert process.returncode == 0, shown
    (record,) = read_records(tmp_path / "out")
    assert record["epochs"] == 2
    (folder,) = tmp_path.glob("out/runs/*")
    # 280 images: four batches of 32 for each process, which share the batch of 64.
    assert [line["images"] for line in json_lines(folder / "epochs.jsonl")] == [256, 256]


def test_a_further_node_leaves_a_baseline_to_the_first(
    tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = checked_benchmark(tiny | {"seeds": [1]})
    monkeypatch.setenv("NODE_RANK", "1")
    plan = make_plan(settings, ["raw-pixels"])
    records, _ = run_benchmark(settings, plan, tmp_path, in_this_process)
    (folder,) = tmp_path.glob("runs/*/")
    assert [file.name for file in folder.iterdir()] == ["planned.json"]
    assert not records


@pytest.mark.slow
def test_slurm_jobs(tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same jobs as SLURM's, run by submitit as processes of this machine."""
    pytest.importorskip("submitit")
    settings = checked_benchmark(tiny | {"seeds": [1]})
    with monkeypatch.context() as patch:
        # Of the jobs; what starts them on this machine imports little.
        patch.setattr(sys, "executable", str(forks.executable(tmp_path)))
        options = {"timeout_min": 5}
        launcher = SlurmLauncher(None, 1, tmp_path / "logs", options, cluster="local")
    plan = make_plan(settings, ["raw-pixels"])
    records, failed = run_benchmark(settings, plan, tmp_path / "out", launcher)
    assert [r["row"] for r in records] == ["raw-pixels"]
    assert not failed


def test_wrong_slurm_options(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(ConfigError, match="--slurm"):
        SlurmLauncher(None, 1, tmp_path, {"slurm_patition": "gpu"}, cluster="local")


def test_students_follow_their_teacher(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Those of a teacher that failed, or that a time limit kept from its end, are not started."""
    tiny["rows"] = {"teacher": {"config": "teacher"}, "seed": {"config": "seed"}}
    settings = checked_benchmark(tiny | {"teacher": "teacher", "seeds": [1]})
    plan = make_plan(settings)
    started: list[str] = []

    def launcher(folders: Sequence[Path], *_: Any) -> dict[Path, str]:
        started.extend(folder.name for folder in folders)
        for folder in folders:
            (folder / CODE).touch()
            if not fails and not stopped:
                (folder / RECORD).write_text("{}")
        return {folder: "out of memory" for folder in folders if fails}

    fails, stopped = True, False
    records, failed = run_benchmark(settings, plan, tmp_path, launcher)
    teacher, student = (run.folder for run in plan)
    assert started == [teacher]
    assert failed == {teacher: "out of memory", student: f"its teacher {teacher} failed"}
    assert records == []
    fails, stopped = False, True
    # What is damaged does not hide the others.
    (damaged := tmp_path / "runs" / "damaged").mkdir()
    (damaged / CODE).touch()
    (damaged / "planned.json").write_text("{")
    assert run_benchmark(settings, plan, tmp_path, launcher) == ([], {})
    assert started[1:] == [teacher]
    (unfinished,) = read_jsonl(tmp_path / UNFINISHED)
    assert (unfinished["row"], unfinished["epochs"], unfinished["of"]) == ("teacher", 0, 3)
    stopped = False
    run_benchmark(settings, plan, tmp_path, launcher)
    assert started[2:] == [teacher, student]


@pytest.mark.matrix
def test_a_time_limit_stops_runs_that_go_on_next_time(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Neither a record nor a failure, and what was trained is not trained again."""
    tiny["budgets"] = {"default": ["max_epochs=100000", "online_eval.every_n_epochs=0"]}
    settings = checked_benchmark(tiny | {"seeds": [1]})
    plan, epochs = make_plan(settings, ["simclr", "raw-pixels"]), [0]
    for _ in range(2):
        until = time.monotonic() + _SAVING + 15
        launcher = LocalLauncher(1, 1, until=until)
        records, failed = run_benchmark(settings, plan, tmp_path, launcher)
        assert (records, failed) == ([], {})
        assert time.monotonic() < until
        (line,) = read_jsonl(tmp_path / UNFINISHED)
        assert (line["row"], line["of"]) == ("simclr", 100000)
        epochs.append(line["epochs"])
    assert epochs == sorted(set(epochs))
    records, _ = run_benchmark(settings, plan[1:], tmp_path, LocalLauncher(1, 1))
    text = write_report(tmp_path)[0].read_text()
    assert f"Unfinished: simclr, seed 1, {epochs[-1]} of 100000 epochs. No result." in text


def test_the_commit_of_a_copy_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "__file__", str(tmp_path / "a" / "b" / "c" / "records.py"))
    version = {"version": __version__}
    assert code_version() == version
    monkeypatch.setenv("SOLO_EXT_COMMIT", "abc")
    assert code_version() == version | {"commit": "abc", "changed": False}
    monkeypatch.setenv("SOLO_EXT_COMMIT", "abc changed")
    assert code_version() == version | {"commit": "abc", "changed": True}


def test_as_many_runs_at_once_as_their_processes_have_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert LocalLauncher(None, threads=2).places == 4
    assert LocalLauncher(None, threads=2, devices=2).places == 2


LAUNCHES = """
import json, sys
from pathlib import Path
from solo_ext.lab.experiments.launchers import LocalLauncher

failed = LocalLauncher(1, 1)([Path(folder) for folder in sys.argv[1:]], lambda: None)
print(json.dumps({folder.name: reason for folder, reason in failed.items()}))
"""


def launched(*folders: Path) -> dict[str, str]:
    """Why runs failed that a process with all that they import has started."""
    done = forks.run("-c", LAUNCHES, *folders)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_process_that_fails(tmp_path: Path) -> None:
    """Its reason is the last line that it printed."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "planned.json").write_text("{}")
    failed = launched(tmp_path / "a", tmp_path / "b")
    assert list(failed) == ["a", "b"]
    assert all("missing" in reason for reason in failed.values())


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_that_fails_in_validation_ends(tmp_path: Path) -> None:
    """An error leaves workers of its loaders, for which nobody must wait."""
    images = made_images(tmp_path / "images")
    val = shutil.copytree(images, tmp_path / "val")
    (val / "2" / "15.png").write_bytes(b"broken")
    config = tiny_run(images, "debiased", max_epochs=1)
    config["data"] |= {"val_path": str(val), "num_workers": 1}
    planned = PlannedRun(
        *("key", "made", "default", "debiased", "plugin", 1),
        config=config,
        baseline=None,
        evaluation={"knn": {}},
        threads=1,
        teacher=None,
        minutes=None,
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "planned.json").write_text(json.dumps(asdict(planned)))
    assert "15.png' cannot be read" in launched(folder)["run"]


def test_a_row_that_has_another_name_now_keeps_its_runs(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    run_here(tiny | {"seeds": [1]}, tmp_path, "raw-pixels")
    tiny["rows"]["pixels"] = tiny["rows"].pop("raw-pixels")
    run_here(tiny | {"seeds": [1]}, tmp_path, "pixels")
    results = read_results(tmp_path)
    assert results.left_out == []
    assert list(results.runs(results.places()[0], "pixels")) == [1]
