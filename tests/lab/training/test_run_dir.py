"""Names and contents of run directories, one for all processes and starts of a run."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.config.check import check_run
from solo_ext.config.schema import AutoResume, RunConfig
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.cli.main import main
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import (
    ENVIRONMENT,
    LOCK,
    METRICS,
    _base_run_dir,
    _choose_run_dir,
    agreed_run_dir,
    check_run_dir,
    checkpoints,
    read_config,
)
from solo_ext.lab.training.trainer import JsonLines, _loggers
from tests import forks
from tests.conftest import MakeConfig
from tests.lab.training.resumable import KillAt
from tests.lab.training.same_run import train, train_killed


def test_checkpoints_are_ordered_by_progress(tmp_path: Path) -> None:
    for name in ("a-ep=10.ckpt", "a-ep=9.ckpt", "a-ep=10-step=700.ckpt", "a-ep=10-step=90.ckpt"):
        (tmp_path / name).touch()
    (tmp_path / ".a-ep=11.ckpt.saving").touch()
    (tmp_path / "other.ckpt").touch()
    names = [c.path.name for c in checkpoints(tmp_path)]
    assert names == ["a-ep=9.ckpt", "a-ep=10-step=90.ckpt", "a-ep=10-step=700.ckpt", "a-ep=10.ckpt"]


def test_digest_follows_what_changes_the_numbers(make_config: MakeConfig) -> None:
    run = prepare(make_config("simclr")).run

    def place(**changes: Any) -> Path:
        return _base_run_dir(run.model_copy(update=changes))

    # A run that stopped at a loss that is not finite can go on in its directory.
    same = {"loggers": [], "on_nonfinite": "skip"}
    for key, value in same.items():
        assert place() == place(**{key: value})
    for key, value in {"max_epochs": 9, "seed": run.seed + 1, "method_kwargs": {}}.items():
        assert place() != place(**{key: value})


def test_run_dirs_do_not_collide(make_config: MakeConfig, tmp_path: Path) -> None:
    given = prepare(make_config("simclr", checkpoint={"dir": str(tmp_path)})).run
    automatic = given.model_copy(update={"auto_resume": AutoResume(enabled=True, max_hours=2.0)})
    first = _choose_run_dir(given)
    assert _choose_run_dir(automatic) == first
    first.mkdir(parents=True)
    second = _choose_run_dir(given)
    assert second.name == f"{first.name}-2"
    assert _choose_run_dir(automatic) == second, "there is nothing to resume in the first"
    checkpoint = first / "tiny-x-ep=0.ckpt"
    checkpoint.touch()
    assert _choose_run_dir(automatic) == first
    second.mkdir()
    (second / "tiny-x-ep=0.ckpt").touch()
    assert _choose_run_dir(automatic) == second, "that of the newest checkpoint is meant"
    old = time.time() - 3 * 3600
    os.utime(second / "tiny-x-ep=0.ckpt", (old, old))
    assert _choose_run_dir(automatic) == first
    os.utime(checkpoint, (old, old))
    assert _choose_run_dir(automatic).name == f"{first.name}-3"


def test_a_named_checkpoint_only_begins_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """Resuming does not go back to `resume_from_checkpoint`."""
    config = make_config("simclr", checkpoint={"every_n_steps": 1}, max_epochs=4)
    train_killed(config, tmp_path / "a", 1)
    (begin,) = checkpoints(tmp_path / "a")
    other = prepare({**config, "resume_from_checkpoint": str(begin.path)})
    with pytest.raises(RuntimeError, match="killed"):
        pretrain(other, run_dir=tmp_path / "b", callbacks=[KillAt(5)], show_progress=False)
    (further,) = checkpoints(tmp_path / "b")
    assert further.step == 5
    started: list[int] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: started.append(trainer.global_step)
    )
    resume(tmp_path / "b", callbacks=[watch])
    assert started == [5, 6, 7]


def test_resumed_from_within(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd RUN; solo-ext pretrain --resume .`"""
    run = tmp_path / "run"
    config = make_config("simclr", checkpoint={"every_n_steps": 1}, max_epochs=3)
    train_killed(config, run, 3)
    monkeypatch.chdir(run)
    assert main(["pretrain", "--resume", "."]) == 0
    assert [held.path.name for held in checkpoints(run)] == ["tiny-run-ep=2.ckpt"]


@pytest.mark.parametrize(("name", "named"), [("exp/lr0.3", True), ("../x", False)])
def test_names_that_lead_elsewhere(
    name: str, named: bool, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Checkpoints are in the run directory and are found there, whatever the run is called."""
    config = make_config("simclr", name=name, checkpoint={"dir": str(tmp_path / "all")})
    run_dir = tmp_path / "all" / "run" if named else None
    result = train(config, run_dir)
    assert result.checkpoint is not None
    assert list(tmp_path.rglob("*.ckpt")) == [result.checkpoint]
    assert result.checkpoint.parent == result.run_dir
    assert resume(result.run_dir).checkpoint == result.checkpoint


def test_a_failed_start_leaves_what_was_there(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the k-means backend is missing, which is found once training starts."""
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events").touch()
    prepared = make_config("pcl")

    def missing(*_: Any) -> None:
        raise ConfigError("method_kwargs.kmeans.backend", "faiss", "it is not installed", "auto")

    monkeypatch.setattr("solo_ext.methods.e_step.EStep.start", missing)
    with pytest.raises(ConfigError, match="not installed"):
        train(prepared, run)
    files = {p for p in run.rglob("*") if p.is_file()}
    assert files - {run / LOCK} == {run / "tensorboard" / "events"}


def test_whose_folder_it_is(make_config: MakeConfig, tmp_path: Path) -> None:
    """A run's, also a copy without hidden files, or one that was killed before its first batch."""
    run = tmp_path / "run"
    train(make_config("simclr"), run)
    check_run_dir(run)
    check_run_dir(tmp_path / "new")
    (run / LOCK).unlink()
    check_run_dir(run)
    (run / ENVIRONMENT).write_text('{"python": "3"}')
    with pytest.raises(ConfigError, match=r"it holds 'args\.json' and is no run"):
        check_run_dir(run)
    killed = tmp_path / "killed"
    (killed / "tensorboard").mkdir(parents=True)
    (killed / LOCK).touch()
    # An evaluation before training has written its numbers.
    (killed / METRICS).touch()
    check_run_dir(killed)
    (killed / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"it holds 'config\.yaml' and is no run"):
        check_run_dir(killed)


def test_checkpoints_are_named_once(make_config: MakeConfig, tmp_path: Path) -> None:
    """An automatic directory bears the run's name already."""
    config = make_config("simclr", checkpoint={"dir": str(tmp_path)})
    result = train(config, None)
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"{result.run_dir.name}-ep=0.ckpt"


def test_files_of_a_run(make_config: MakeConfig, images: Path, tmp_path: Path) -> None:
    """What upstream's scripts read is there: args.json and one checkpoint of the usual name."""
    config = make_config("simclr", data={"val_path": str(images)}, max_epochs=2)
    result = train(config, tmp_path / "v1")
    names = {p.name for p in result.run_dir.iterdir()}
    assert names == {
        "args.json",
        "config.yaml",
        "environment.json",
        "epochs.jsonl",
        "metrics.jsonl",
        "tiny-v1-ep=1.ckpt",
        "tiny-v1-ep=0.ckpt.previous",
        ".lock",
    }
    args = json.loads((result.run_dir / "args.json").read_text())
    assert args["method"] == "simclr"
    assert args["data"]["num_classes"] == 3
    assert args["data"]["num_large_crops"] == 2
    assert args["optimizer"]["lr"] == pytest.approx(0.3 * 24 / 256)
    validated = [r for r in read_jsonl(result.run_dir / "metrics.jsonl") if "val_acc1" in r]
    assert len(validated) == 2
    environment = json.loads((result.run_dir / "environment.json").read_text())
    assert environment["host"]["generation"] in ("main", "1.0.2")


def test_a_profile(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config("simclr", profiler="simple"), tmp_path / "run")
    (profile,) = (tmp_path / "run").glob("*profile*")
    assert "run_training_batch" in profile.read_text()


@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        ({"enabled": False}, []),
        # Behind the last one the one before it, within an epoch or not.
        ({"every_n_steps": 1}, ["ep=3-step=7.ckpt.previous", "ep=3.ckpt"]),
        (
            {"keep_prev": True, "frequency": 2, "every_n_steps": 1},
            ["ep=0.ckpt", "ep=2.ckpt", "ep=3-step=7.ckpt.previous", "ep=3.ckpt"],
        ),
    ],
)
def test_kept_checkpoints(
    checkpoint: dict[str, Any], names: list[str], make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config("simclr", checkpoint=checkpoint, max_epochs=4)
    result = train(config, tmp_path / "run")
    assert sorted(p.name for p in tmp_path.rglob("*.ckpt*")) == [f"tiny-run-{n}" for n in names]
    assert (result.checkpoint is None) == (not names)


def test_leftovers_of_a_killed_process_go(make_config: MakeConfig, tmp_path: Path) -> None:
    """Killed while writing, or between writing a checkpoint and removing the one before it."""
    run = tmp_path / "run"
    config = make_config("simclr", checkpoint={"every_n_steps": 1}, max_epochs=2)
    train_killed(config, run, 3)
    (left,) = checkpoints(run)
    shutil.copy(left.path, run / "tiny-run-ep=0.ckpt")
    for name in (".tiny-run-ep=1-step=4.ckpt.saving", "somebody-elses.ckpt"):
        (run / name).touch()
    resume(run)
    names = {p.name for p in run.iterdir() if ".ckpt" in p.name}
    assert names == {
        "tiny-run-ep=1.ckpt",
        "tiny-run-ep=1-step=3.ckpt.previous",
        "somebody-elses.ckpt",
    }


def test_a_config_that_is_none_is_named(tmp_path: Path) -> None:
    for text, says in (("[", "not YAML"), ("- a", "not a config"), ("", "not a config")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=rf"config\.yaml: {says}"):
            read_config(tmp_path)


def test_half_written_lines_are_passed_over(tmp_path: Path) -> None:
    """And what is no number is null, for JSON has no other word for it."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log_metrics({"a": 1.0, "b": float("nan")}, step=3)
    with lines.file.open("a") as handle:
        handle.write('{"step": 4, "a"')
    (record,) = read_jsonl(lines.file)
    assert (record["step"], record["a"], record["b"]) == (3, 1.0, None)
    JsonLines(lines.file).go_on(2, None)
    assert read_jsonl(lines.file) == []


def test_seconds_go_on_without_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("solo_ext.lab.training.trainer.time.monotonic", lambda: now)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (0, 1, 2):
        now += 10
        lines.log_metrics({"a": step}, step=step)
    now = 5.0  # The machine was started anew.
    resumed = JsonLines(lines.file)
    for _ in range(2):
        resumed.go_on(2, None)
    now += 7
    resumed.log_metrics({"a": 2}, step=2)
    assert [line["seconds"] for line in read_jsonl(lines.file)] == [10.0, 20.0, 27.0]


def test_lines_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Those of steps that are repeated go, step 0 too; what a checkpoint knows of is added once."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (0, 1, 1, 2):
        lines.log_metrics({"a": step}, step=step)
    last = {"step": 1, "metrics": {"b": 7.0}}

    def held() -> list[tuple[int, set[str]]]:
        found = read_jsonl(lines.file)
        return [(line["step"], line.keys() - {"step", "seconds"}) for line in found]

    for _ in range(2):
        lines.go_on(2, last)
        assert held() == [(0, {"a"}), (1, {"a"}), (1, {"a"}), (1, {"b"})]
    lines.go_on(0, None)
    assert held() == []
    # Killed between its first checkpoint and its first line.
    lines.file.unlink()
    lines.go_on(2, last)
    assert held() == [(1, {"b"})]


# The second process looks once the first has made its directory; when both have, they fail, once.
LATE = """
import os, sys, time
from pathlib import Path
import yaml
from solo_ext.config.check import check_run
from solo_ext.lab.training.run_dir import agreed_run_dir

rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
given = check_run(yaml.safe_load(Path(sys.argv[1]).read_text()))

def wait_for(number):
    while not Path(f"{sys.argv[1]}-{number}-{again}").exists():
        time.sleep(0.05)

if rank:
    wait_for(0)
path = agreed_run_dir(given)
path.mkdir(parents=True, exist_ok=True)
print("took", rank, again, path, flush=True)
Path(f"{sys.argv[1]}-{rank}-{again}").touch()
wait_for(1 - rank)
sys.exit(0 if again else 1)
"""


@pytest.fixture
def given(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    return check_run(make_config("simclr", checkpoint={"dir": str(tmp_path / "runs")}))


@pytest.mark.slow
def test_processes_of_torchrun(given: RunConfig, tmp_path: Path) -> None:
    """The same one, and again after a restart: the run goes on there."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given.model_dump()))
    words = ["--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    script = (tmp_path / "late.py", tmp_path / "given.yaml")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks.run("-m", "torch.distributed.run", *words, *script, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = sorted(line.split()[1:] for line in done.stdout.splitlines() if "took" in line)
    first = str(_choose_run_dir(given)).removesuffix("-2")
    assert lines == [[rank, again, first] for rank in "01" for again in "01"]


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "pcl"}, "-job-17"),
        (
            {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"},
            "-job-17_2",
        ),
    ],
    ids=["job", "array"],
)
def test_a_requeued_job_goes_on(
    job: dict[str, str], ending: str, given: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _choose_run_dir(given)
    for key, value in job.items():
        monkeypatch.setenv(key, value)
    path = agreed_run_dir(given)
    assert path == plain.with_name(plain.name + ending)
    path.mkdir(parents=True)
    assert agreed_run_dir(given) == path


def test_torchrun_within_a_job(given: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a requeued job's torchrun is a new one: what the job is called stays."""
    plain = _choose_run_dir(given)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert agreed_run_dir(given) == plain.with_name(f"{plain.name}-job-17")


def test_another_job_finds_the_unfinished_run(
    given: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    first = agreed_run_dir(given)
    first.mkdir(parents=True)
    (first / "simclr-ep=0.ckpt").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert agreed_run_dir(given).name.endswith("-job-18")
    automatic = AutoResume(enabled=True, max_hours=1)
    asked = given.model_copy(update={"auto_resume": automatic})
    assert agreed_run_dir(asked) == first
    os.utime(first / "simclr-ep=0.ckpt", (1, 1))
    assert agreed_run_dir(asked).name.endswith("-job-18")


def test_by_hand_within_a_job(given: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is another run."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    first = agreed_run_dir(given)
    first.mkdir(parents=True)
    assert agreed_run_dir(given).name == f"{first.name}-2"


def test_loggers_by_name(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is Lightning's own; a resumed run adds a table to those of its earlier parts."""
    run = prepare(make_config("simclr", loggers=["csv"], max_epochs=1)).run
    assert [type(one).__name__ for one in _loggers(run, tmp_path)] == ["CSVLogger"]
    config = make_config("simclr", loggers=["csv"], log_every_n_steps=1)
    for epochs in (1, 2):
        pretrain(prepare(config | {"max_epochs": epochs}), run_dir=tmp_path / "run", force=True)
    tables = sorted((tmp_path / "run" / "csv").glob("version_*/metrics.csv"))
    assert len(tables) == 2
    assert all("train_nce_loss" in table.read_text() for table in tables)
    given: list[Any] = []
    for name in ("MLFlowLogger", "WandbLogger"):
        monkeypatch.setattr(
            f"lightning.pytorch.loggers.{name}", lambda **words: given.append(words)
        )
    run = prepare(make_config("simclr", loggers=["mlflow", "wandb"])).run
    _loggers(run, tmp_path / "mine")
    assert given[0]["tracking_uri"] == f"sqlite:///{tmp_path / 'mine' / 'mlflow.db'}"
    assert (given[0]["run_name"], given[1]["project"]) == ("mine", "solo-learn")


def test_wandb_goes_on_with_the_run_that_it_began(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's name is not the id: two members of a team may have folders of the same name."""
    given: list[Any] = []
    logger = "lightning.pytorch.loggers.WandbLogger"
    monkeypatch.setattr(logger, lambda **words: given.append(words))
    run = prepare(make_config("simclr", wandb={"enabled": True, "project": "p"})).run
    for name in ("", "run-20260102_030405-k3j2h1", "offline-run-20260203_040506-seed-0"):
        (tmp_path / "wandb" / name).mkdir(parents=True, exist_ok=True)
        _loggers(run, tmp_path)
    assert [words["id"] for words in given] == [None, "k3j2h1", "seed-0"]
