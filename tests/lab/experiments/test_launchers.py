"""Launchers beside what the grids show: memory, SLURM's jobs, the table."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from solo_ext.core.errors import ConfigError
from solo_ext.lab.experiments import launchers
from solo_ext.lab.experiments.launchers import LocalLauncher, SlurmLauncher
from solo_ext.lab.experiments.plan import make_plan
from solo_ext.lab.experiments.run import Progress, run_benchmark
from solo_ext.lab.experiments.settings import checked_benchmark


def quick(tiny: dict[str, Any]) -> Any:
    tiny["rows"] = {"raw-pixels": {"baseline": "raw-pixels"}, "simclr": tiny["rows"]["simclr"]}
    return checked_benchmark(tiny | {"seeds": [1], "default_rows": ["raw-pixels"]})


@pytest.mark.slow
def test_slurm_jobs(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """The same jobs as SLURM's, run by submitit as processes of this machine."""
    pytest.importorskip("submitit")
    settings = quick(tiny)
    launcher = SlurmLauncher(None, 1, tmp_path / "logs", {"timeout_min": 5}, cluster="local")
    result = run_benchmark(settings, make_plan(settings), tmp_path / "out", launcher)
    assert [r["row"] for r in result.records] == ["raw-pixels"]
    assert not result.failed


def test_wrong_slurm_options(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(ConfigError, match="--slurm"):
        SlurmLauncher(None, 1, tmp_path, {"slurm_patition": "gpu"}, cluster="local")


def test_memory_decides_how_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LocalLauncher(4, 1, 2e9)
    running: list[Any] = []

    class Process:
        pid = 0

    def room(free: float, resident: float) -> bool:
        monkeypatch.setattr(launchers, "_available", lambda: free)
        monkeypatch.setattr(launchers, "_resident", lambda pid: resident)
        return launcher._room(running)

    assert room(0.0, 0.0), "one run is always started"
    running.append(launchers._Running(Path(), Process(), 0))  # type: ignore[arg-type]
    assert not room(3.9e9, 0.0), "what has begun will take its part"
    assert room(2.1e9, 2e9)
    running *= 4
    assert not room(1e12, 2e9), "no more than the places"


def test_lines_where_nobody_looks(tmp_path: Path, tiny: dict[str, Any]) -> None:
    plan = make_plan(quick(tiny))
    out = io.StringIO()
    with Progress(plan, Console(file=out)) as table:
        table(tmp_path, {})
        record: Any = {"key": plan[0].key, "scores": {"knn": 12.345}}
        table(tmp_path, {plan[0].key: record})
        table(tmp_path, {plan[0].key: record})
    assert out.getvalue().splitlines() == ["1/1  digits default raw-pixels seed 1  knn 12.35"]


def test_what_is_at_work_on_a_terminal(tmp_path: Path, tiny: dict[str, Any]) -> None:
    plan = make_plan(checked_benchmark(tiny))
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    (tmp_path / plan[1].folder).mkdir()
    (tmp_path / plan[1].folder / "epochs.jsonl").write_text('{"epoch": 0}\n')
    done: Any = {plan[0].key: {"key": plan[0].key, "scores": {"knn": 80.0}}}
    watch = Progress(plan, console)
    watch(tmp_path, done)
    said = str(watch._status.status)
    assert said == "1 of 8 runs; digits default debiased seed 1: epoch 1 of 3"


def test_students_wait_for_their_teacher_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("teacher", "student", "other")}
    for place in places.values():
        place.mkdir()
    started: list[str] = []

    class Process:
        """Ends at the second look; the teacher leaves a record, or does not."""

        pid, returncode = 0, 0

        def __init__(self, folder: Path) -> None:
            self.folder, self.looks = folder, 0

        def poll(self) -> int | None:
            self.looks += 1
            if self.looks < 2:
                return None
            if leaves or self.folder.name != "teacher":
                (self.folder / "record.json").write_text("{}")
            return 0

    def start(self: LocalLauncher, folder: Path, slot: int) -> Any:
        started.append(folder.name)
        return launchers._Running(folder, Process(folder), slot)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalLauncher, "_start", start)
    monkeypatch.setattr(launchers, "_available", lambda: 1e12)
    monkeypatch.setattr(launchers, "TICK", 0.0)
    folders = [places[name] for name in ("teacher", "student", "other")]
    needs = {places["student"]: places["teacher"]}
    leaves = True
    assert LocalLauncher(2, 1, 1e9).run(folders, needs, lambda: None) == []
    assert started == ["teacher", "other", "student"]
    for place in places.values():
        (place / "record.json").unlink()
    started.clear()
    leaves = False
    failed = LocalLauncher(2, 1, 1e9).run(folders, needs, lambda: None)
    assert [o.folder.name for o in failed] == ["teacher", "student"]
    assert failed[1].reason == "its teacher teacher failed"
    assert "student" not in started
