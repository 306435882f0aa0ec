"""A disk that is full, wherever a command writes: one line, and what was written stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from solo_ext.core.errors import UserError
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import checkpoints
from tests.conftest import MakeConfig
from tests.lab.cli.conftest import Command, Outcome
from tests.lab.training.same_run import command_of, logged, train
from tests.mounts import fill, small_disk

pytestmark = pytest.mark.fault
DISKS = {"no room": "size=1m", "no inodes": "size=1m,nr_inodes=24"}


class FillAt(Callback):
    """Takes what room there is before the batch that follows ``step`` others."""

    def __init__(self, disk: Path, step: int) -> None:
        self.disk, self.step = disk, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            fill(self.disk)


def use_up(disk: Path) -> None:
    """Every inode and every byte."""
    for number in range(24):
        try:
            (disk / f"empty-{number}").touch()
        except OSError:
            break
    fill(disk)


def assert_one_line(result: Outcome) -> str:
    assert result.code == 2, result.err
    (line,) = [line for line in result.lines if line.startswith("solo-ext: ")]
    assert "Traceback" not in result.err
    assert "No space left on device" in line
    return line


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}


@pytest.mark.slow
def test_metrics(make_config: MakeConfig, tmp_path: Path) -> None:
    """In training; room made, the run goes on from its checkpoint, with every line once."""
    config = make_config("simclr", max_epochs=14, log_every_n_steps=1)
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        run = disk / "run"
        # Without another checkpoint, which would meet the full disk first.
        seldom = {**config, "checkpoint": {"frequency": 13}}
        with pytest.raises(UserError, match="No space left on device") as caught:
            train(seldom, run, callbacks=[FillAt(disk, 3)])
        assert str(caught.value).endswith(
            f"make room, then `solo-ext pretrain --resume {run}` goes on; what was written stays"
        )
        (held,) = checkpoints(run)
        assert held.epoch == 0
        (disk / "ballast").unlink()
        resume(run)
        train(config, tmp_path / "whole")
        assert logged(run) == logged(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("options", DISKS.values(), ids=DISKS)
@pytest.mark.parametrize(
    "words", [("knn", "k=[3]"), ("suite", "protocols=[knn]"), ("knn", "k=[3]", "--json")], ids=str
)
def test_evaluation(
    words: tuple[str, ...], options: str, own_run: Path, command: Command, tmp_path: Path
) -> None:
    """The numbers of a single protocol are printed all the same."""
    with small_disk(tmp_path / "disk", options) as disk:
        out = disk / "out"
        out.mkdir()
        use_up(disk)
        before = contents(own_run)
        protocol, *settings = words
        features = tmp_path / "features"
        result = command(
            "eval", protocol, str(own_run), f"out={out}", f"features_dir={features}", *settings
        )
        line = assert_one_line(result)
        assert str(out) in line
        if "--json" in words:
            assert len(json.loads(result.out)["results"]) == 2
        elif protocol == "knn":
            assert "acc1" in result.out
        assert contents(own_run) == before
        assert [f for f in out.iterdir() if f.suffix != ".lock"] == []


@pytest.mark.parametrize("options", DISKS.values(), ids=DISKS)
@pytest.mark.parametrize("form", ["timm", "safetensors"])
def test_export(form: str, options: str, own_run: Path, command: Command, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        use_up(disk)
        out = disk / ("backbone.safetensors" if form == "safetensors" else "folder")
        line = assert_one_line(command("export", str(own_run), "--format", form, f"--out={out}"))
        assert str(out) in line
        assert not out.exists()


def test_features_of_an_e_step(make_config: MakeConfig, command: Command, tmp_path: Path) -> None:
    """Before an epoch is trained, though the first E-step comes later."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        # 1.5 kB of features.
        use_up(disk)
        kwargs = {"features_dir": str(disk / "features"), "warmup_epochs": 1}
        (disk / "empty-0").unlink()
        config = make_config("pcl", method_kwargs=kwargs, max_epochs=2)
        line = assert_one_line(command(*command_of(config, tmp_path, tmp_path / "run")))
        assert str(disk / "features") in line
        assert checkpoints(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("options", DISKS.values(), ids=DISKS)
def test_pretrain_and_benchmark(
    options: str, make_config: MakeConfig, command: Command, tmp_path: Path
) -> None:
    """Before anything is trained."""
    with small_disk(tmp_path / "disk", options) as disk:
        use_up(disk)
        words = command_of(make_config("simclr"), tmp_path, disk / "run")
        assert_one_line(command(*words))
        assert_one_line(command("benchmark", "run", "demo", f"--out={disk}"))
        shutil.rmtree(disk, ignore_errors=True)
