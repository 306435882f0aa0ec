"""A benchmark on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from solo_ext.core.errors import ConfigError, StoppedBySignal, UserError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.experiments import launchers
from solo_ext.lab.experiments.launchers import LocalLauncher, RayLauncher
from solo_ext.lab.experiments.plan import make_plan
from solo_ext.lab.experiments.records import read_records
from solo_ext.lab.experiments.run import run_benchmark
from solo_ext.lab.experiments.settings import checked_benchmark
from solo_ext.lab.experiments.work import CODE
from solo_ext.lab.training.run_dir import EPOCHS, METRICS, checkpoints
from tests.lab.experiments.conftest import in_this_process

Tick = Callable[[], None]
SOON = {"health_check_period_ms": 500}
"""A raylet that is gone answers at once; how long one that answers may take stays as it is."""
TOKEN = secrets.token_hex(32)


@pytest.fixture
def tiny(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs that are still at work half a second after a line of theirs was read."""
    monkeypatch.delenv("SOLO_EXT_DATA")
    tiny["datasets"]["digits"].append("backbone.kwargs.stem_width=32")
    return tiny


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, the second of which a test may kill."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'solo-ext[ray]'")
    # Where the cluster's own files lie; paths of sockets are short.
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Without these, read on import, Ray would write a token into the home directory.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    import ray
    from ray.cluster_utils import Cluster

    # As where SLURM started Ray on two nodes.
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    before = set(psutil.pids())
    nodes = Cluster()
    try:
        # Busy machines take longer than the 30 seconds that it would wait for each.
        nodes.add_node(wait=False, num_cpus=1, include_dashboard=False, _system_config=SOON)
        nodes.add_node(wait=False, num_cpus=1)
        nodes.wait_for_nodes(timeout=180)
        monkeypatch.delenv("SLURM_NTASKS")
        monkeypatch.delenv("SLURM_PROCID")
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(place, ignore_errors=True)
    words = (place, "-m solo", "-m stub")
    wait_until(lambda: not [one for one in processes(before) if any(w in one for w in words)])


def processes(before: set[int]) -> Iterator[str]:
    """Command lines of the processes that have begun since."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.info["pid"] not in before:
            yield " ".join(process.info["cmdline"] or [])


def wait_until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def numbers(out: Path) -> dict[str, Any]:
    return {
        r["key"]: (r["row"], r["scores"], r["epochs"], r["images"], r["curves"]["scores"])
        for r in read_records(out)
        if r["curves"] is not None
    }


def runs_of(folder: Path) -> list[psutil.Process]:
    """The process of a run on each of its nodes; its parent is the worker of Ray."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-1:] == [str(folder)]
    ]


def lines(file: Path) -> int:
    return len(read_jsonl(file))


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_worker_and_a_lost_node(
    cluster: Any, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    """One of two runs loses its worker, the other its node: both end as if left alone."""
    tiny["datasets"]["digits"].append("max_epochs=6")
    settings = checked_benchmark(tiny | {"seeds": [1]})
    plan, out = make_plan(settings, ["simclr", "debiased"]), tmp_path / "out"
    ray = RayLauncher(1)
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    killed: dict[Path, bool] = {}

    def launcher(given: Sequence[Path], tick: Tick) -> dict[Path, str]:
        def tick_and_kill() -> None:
            tick()
            # A checkpoint follows the first epoch.
            if killed or not all(lines(folder / EPOCHS) > 1 for folder in given):
                return
            for folder in given:
                (process,) = runs_of(folder)
                on_node = raylet in [parent.pid for parent in process.parents()]
                killed[folder] = on_node
                if on_node:
                    cluster.remove_node(node, allow_graceful=False)
                else:
                    process.parent().kill()

        return ray(given, tick_and_kill)

    records, failed = run_benchmark(settings, plan, out, launcher)
    assert not failed
    assert sorted(killed.values()) == [False, True]
    assert len(records) == len(read_records(out)) == 2
    for folder in killed:
        assert lines(folder / CODE) == 2, "starts"
        assert lines(folder / EPOCHS) <= 6 + 1, "only the epoch at hand is repeated"
    run_benchmark(settings, plan, tmp_path / "whole", in_this_process)
    assert numbers(out) == numbers(tmp_path / "whole")


def node_of(cluster: Any, folder: Path, rank: int) -> Any:
    """The node of the cluster that has this one of a run."""
    (process,) = (p for p in runs_of(folder) if p.environ()["NODE_RANK"] == str(rank))
    above = {parent.pid for parent in process.parents()}
    nodes = cluster.worker_nodes
    (node,) = (n for n in nodes if n.all_processes["raylet"][0].process.pid in above)
    return node


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_of_two_nodes_loses_both(cluster: Any, tmp_path: Path, tiny: dict[str, Any]) -> None:
    """First one, then the other. It goes on with those that take their place, and ends as on two
    devices of one machine."""
    tiny["datasets"]["digits"] += ["max_epochs=6", "strategy=ddp"]
    rows = ["debiased", "raw-pixels"]
    settings = checked_benchmark(tiny | {"seeds": [1]})
    # The head of the cluster, which cannot be lost, has none of these.
    spare = {"num_cpus": 1, "resources": {"spare": 1}}
    ray = RayLauncher(1, options={"resources": {"spare": 1}}, nodes=2)
    for _ in range(2):
        cluster.add_node(wait=False, **spare)
    losses = {1: 1, 3: 0}

    def launcher(given: Sequence[Path], tick: Tick) -> dict[Path, str]:
        def tick_and_lose() -> None:
            tick()
            for folder in given:
                # A checkpoint follows each epoch.
                for epochs in [e for e in losses if lines(folder / EPOCHS) > e]:
                    lost = node_of(cluster, folder, losses.pop(epochs))
                    cluster.remove_node(lost, allow_graceful=False)
                    cluster.add_node(wait=False, **spare)

        return ray(given, tick_and_lose)

    plan = make_plan(settings, rows, nodes=2)
    records, failed = run_benchmark(settings, plan, tmp_path, launcher)
    assert not failed
    assert not losses
    assert [record["row"] for record in records] == rows
    (folder,) = tmp_path.glob("runs/*-debiased-*")
    assert lines(folder / CODE) == 3, "starts"
    # 280 images: four batches of 32 for each process, which share the batch of 64.
    assert {line["images"] for line in read_jsonl(folder / EPOCHS)} == {256}
    assert 6 <= lines(folder / EPOCHS) <= 6 + 2, "only the epoch at hand is repeated"
    plan = make_plan(settings, ["debiased"], devices=2)
    whole, _ = run_benchmark(settings, plan, tmp_path / "whole", LocalLauncher(1, 1, devices=2))
    assert whole[0]["scores"] == records[0]["scores"]
    assert whole[0]["curves"] is not None
    assert records[0]["curves"] is not None
    assert whole[0]["curves"]["scores"] == records[0]["curves"]["scores"]


STUB = """
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
with open(folder / "starts", "a") as starts:
    starts.write(".")
if folder.name == "broken":
    sys.exit("solo-ext: no images")
if folder.name == "huge" or len((folder / "starts").read_text()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
assert os.environ["OMP_NUM_THREADS"] == "3"
(folder / "record.json").touch()
"""


@pytest.mark.slow
@pytest.mark.fault
def test_what_is_started_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed is, as often as was asked; one that failed is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stub.py").write_text(STUB)
    folders = [tmp_path / name for name in ("broken", "huge", "killed")]
    for folder in folders:
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(launchers.work, "__module__", "stub")
        launcher = RayLauncher(3, 1, {"num_cpus": 1, "max_retries": 2})
    assert launcher(folders, lambda: None) == {
        tmp_path / "broken": "no images",
        tmp_path / "huge": "killed by signal 9 (out of memory?): it printed nothing, exit code -9",
    }
    assert [len((folder / "starts").read_text()) for folder in folders] == [1, 3, 2]
    with pytest.raises(ConfigError, match=r"--ray=\{'max_retrys': 1\}: Invalid option"):
        RayLauncher(1, 1, {"max_retrys": 1})


STUB_OF_TWO = """
import os, pathlib, signal, sys, time
folder, node = pathlib.Path(sys.argv[1]), os.environ["NODE_RANK"]
assert not [name for name in os.environ if name.startswith("SLURM_")]

def starts(of):
    file = folder / f"starts{of}"
    return len(file.read_text()) if file.exists() else 0

with open(folder / f"starts{node}", "a") as file:
    file.write(".")
while starts(1) < starts(0):
    time.sleep(0.1)
victim = {"killed": os.getpid(), "lost": os.getppid(), "first": os.getppid()}.get(folder.name)
waits = starts(0) == 1 or victim is None
if node == ("0" if folder.name == "first" else "1"):
    if victim is None:
        print("solo-ext: no images")
        sys.exit({"failed": 1, "mistaken": 2}[folder.name])
    if starts(node) == 1:
        os.kill(victim, signal.SIGKILL)
if waits:
    # As a process does that hangs because another one is gone.
    sys.stdin.read()
    sys.exit(1)
if node == "0":
    (folder / "record.json").touch()
"""


@pytest.mark.slow
@pytest.mark.fault
def test_what_is_started_again_on_both_nodes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but a mistake: the process or the task of one node is lost, or it fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stub.py").write_text(STUB_OF_TWO)
    names = ["mistaken", "killed", "lost", "first", "failed"]
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(launchers.work, "__module__", "stub")
        launcher = RayLauncher(1, 1, {"max_retries": 2}, nodes=2)
    assert launcher(folders, lambda: None) == {
        tmp_path / "mistaken": "no images",
        tmp_path / "failed": "no images",
    }
    for node in range(2):
        starts = [len((folder / f"starts{node}").read_text()) for folder in folders]
        assert starts == [1, 2, 2, 2, 3]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("nodes", [1, 2])
def test_told_to_end_it_saves(
    cluster: Any, tmp_path: Path, tiny: dict[str, Any], nodes: int
) -> None:
    tiny["datasets"]["digits"] += ["optimizer.batch_size=8", "log_every_n_steps=1"]
    settings = checked_benchmark(tiny | {"seeds": [1]})
    plan, ray = make_plan(settings, ["debiased"], nodes=nodes), RayLauncher(1, nodes=nodes)

    def launcher(given: Sequence[Path], tick: Tick) -> dict[Path, str]:
        def stops() -> None:
            # Evaluations come before the first step.
            if any('"train_' in f.read_text() for f in tmp_path.glob(f"runs/*/{METRICS}")):
                raise StoppedBySignal("stopped", signal.SIGTERM)

        return ray(given, stops)

    with pytest.raises(StoppedBySignal):
        run_benchmark(settings, plan, tmp_path, launcher)
    (run_dir,) = tmp_path.glob("runs/*/")
    (saved,) = checkpoints(run_dir)
    assert saved.step is not None
    assert "stopped by SIGTERM" in (run_dir / "work.log").read_text()


def test_too_few_nodes_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray would wait for them without a word."""
    ray = MagicMock()
    ray.cluster_resources.return_value = {}
    ray.nodes.return_value = [
        {"Alive": alive, "Resources": {"CPU": 2.0}} for alive in (True, False)
    ]
    monkeypatch.setitem(sys.modules, "ray", ray)
    RayLauncher(2)
    assert not caplog.messages
    RayLauncher(2, nodes=2)
    assert caplog.messages == ["--nodes=2: runs wait for nodes with {'CPU': 2}, of which Ray has 1"]


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'solo-ext\[ray\]'"):
        RayLauncher(1)
