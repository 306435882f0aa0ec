"""Which checkpoint a run goes on from, and which it refuses."""

from __future__ import annotations

import errno
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import CONFIG, METRICS, checkpoints, read_config
from tests.attack.world import take_older
from tests.conftest import SIDE, MakeConfig, made_images, packed
from tests.lab.training.resumable import config_of
from tests.lab.training.same_run import same_weights, train, train_killed


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def flip(file: Path) -> None:
    """One bit of the weights: the file is as long, and loads."""
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        inside = archive.read(largest)
    data = file.read_bytes()
    place = data.index(inside) + len(inside) // 2
    file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    torch.load(file, weights_only=True)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def another_kind(file: Path) -> None:
    torch.save({"weights": torch.ones(3)}, file)


@pytest.fixture(scope="module")
def whole(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config("debiased", max_epochs=2)
    return train(config, tmp_path_factory.mktemp("whole") / "run").run_dir


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of a run of two epochs."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.fault
@pytest.mark.parametrize("damage", [tear, flip, empty, another_kind])
def test_the_one_before_a_damaged_one_is_used(
    damage: Callable[[Path], None], whole: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = checkpoints(run)[-1].path
    damage(newest)
    with caplog.at_level(logging.WARNING):
        resume(run)
    assert f"{newest.name}' cannot be read" in caplog.text
    assert "the one before it is used" in caplog.text
    assert (run / f"{newest.name}.unreadable").is_file()
    assert same_weights(whole, run)


@pytest.mark.fault
def test_none_that_can_be_read(run: Path) -> None:
    """The run does not start over by itself."""
    for held in checkpoints(run, previous=True):
        tear(held.path)
    names = {file.name for file in run.iterdir()}
    with pytest.raises(UserError, match=r"ep=1\.ckpt' cannot be read .* has no other one that can"):
        resume(run)
    assert {file.name for file in run.iterdir()} == names


@pytest.mark.fault
@pytest.mark.parametrize(
    ("method", "other", "upstream", "says"),
    [
        ("debiased", "simclr", False, 'method: "debiased" -> "simclr"'),
        ("simclr", "mocov2plus", True, r"begin.ckpt' does not fit this method .*Missing key"),
    ],
)
def test_another_method_is_refused_before_anything_is_written(
    method: str, other: str, upstream: bool, says: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A checkpoint of solo-learn's own script has no config to tell by."""
    run = train(make_config(method), tmp_path / "run").run_dir
    state = torch.load(checkpoints(run)[-1].path, weights_only=True)
    if upstream:
        del state["solo_ext"]
    torch.save(state, tmp_path / "begin.ckpt")
    config = make_config(other, resume_from_checkpoint=str(tmp_path / "begin.ckpt"))
    with pytest.raises(UserError, match=says):
        train(config, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def as_they_are(folder: Path) -> Path:
    return folder


def in_hdf5(folder: Path) -> Path:
    return packed(folder, folder.with_suffix(".h5"))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("data", "kept"),
    [({}, as_they_are), ({"format": "h5", "no_labels": True, "unreadable": "skip"}, in_hdf5)],
    ids=["folder", "skip-no_labels"],
)
def test_other_images_are_refused(
    data: dict[str, Any],
    kept: Callable[[Path], Path],
    make_config: MakeConfig,
    images: Path,
    tmp_path: Path,
) -> None:
    """Resumed as it was, but there are other files by now."""
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    data = {**data, "train_path": str(kept(folder))}
    run = train(make_config("debiased", data=data, max_epochs=2), tmp_path / "run").run_dir
    resume(run)
    some = sorted(folder.rglob("*.png"))
    some[0].rename(some[0].with_name("another.png"))
    kept(folder)
    with pytest.raises(UserError, match="training images: as many, of other names"):
        resume(run)
    some[0].with_name("another.png").rename(some[0])
    kept(folder)
    resume(run)
    if "format" not in data:
        Image.new("RGB", (SIDE, SIDE)).save(some[0])
        with pytest.raises(UserError, match="training images: others under the same names"):
            resume(run)
    shutil.copy(some[1], some[1].with_name("more.png"))
    kept(folder)
    with pytest.raises(UserError, match=f"training images: {len(some)} -> {len(some) + 1}"):
        resume(run)


def test_other_validation_images_are_told(
    make_config: MakeConfig, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    val = Path(shutil.copytree(images, tmp_path / "val"))
    config = make_config("debiased", data={"val_path": str(val)}, max_epochs=2)
    train_killed(config, tmp_path / "run", 3)
    resume(tmp_path / "run")
    assert "validation images" not in caplog.text
    next(val.rglob("*.png")).unlink()
    resume(tmp_path / "run")
    assert "other validation images than before" in caplog.text


def test_a_run_of_an_older_version(make_config: MakeConfig, tmp_path: Path) -> None:
    """By now settings are gone that its config has; its weights can be used."""
    run = tmp_path / "run"
    take_older(run, made_images(tmp_path / "images"))
    keys = ("clusters.e_step_features", "clusters.e_step_dir", "queue_size")
    gone = [f"~method_kwargs.{key}" for key in keys]
    with pytest.raises(UserError, match=r"e_step_features='memory': unknown key; .*0\.1\.dev245"):
        resume(run)
    with pytest.raises(UserError, match=r"e_step_dir=null: unknown key; .*'~method_kwargs"):
        resume(run, gone[:1])
    with pytest.raises(UserError, match="seeed=1: unknown key") as mistake:
        resume(run, [*gone, "seeed=1"])
    assert "0.1.dev245" not in str(mistake.value), "a mistake of today"
    for force in (False, True):
        with pytest.raises(UserError, match=r"of another version .*no 'identity'.*=.*/run$"):
            resume(run, gone, force=force)
    assert checkpoints(run), "it is kept"
    sizes = {"proj_hidden_dim": 8, "proj_output_dim": 4}
    kwargs = {"channels": [4, 4, 4, 4], "small_stem": False, "stem_width": 4}
    backbone = {"kwargs": kwargs, "weights": str(run)}
    config = make_config("debiased", backbone=backbone, method_kwargs=sizes)
    assert train(config, tmp_path / "new").epochs == 1


def test_a_copy_of_the_images_and_settings_that_change_no_number_will_do(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """As after a requeued job has unpacked them on another machine, files of another time."""
    copy = Path(shutil.copytree(images, tmp_path / "copy", copy_function=shutil.copyfile))
    first, second = (
        make_config(
            "debiased",
            data={"train_path": str(folder), "num_workers": workers},
            log_every_n_steps=workers + 1,
            max_epochs=2,
        )
        for workers, folder in enumerate((images, copy))
    )
    train_killed(first, tmp_path / "run", 3)
    train(second, tmp_path / "run")
    assert checkpoints(tmp_path / "run")[-1].epoch == 1


def test_forced(make_config: MakeConfig, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(make_config("debiased", max_epochs=3), run, force=True)
    assert "goes on from another run's checkpoint: max_epochs: 2 -> 3" in caplog.text
    assert checkpoints(run)[-1].epoch == 2
    adam = make_config("debiased", max_epochs=4, optimizer={"name": "adamw", "kwargs": {}})
    with pytest.raises(UserError, match=r"holds another optimiser's state: .*start a new run"):
        train(adam, run, force=True)


def test_a_longer_run_is_a_wish_of_its_own(run: Path) -> None:
    """What --force would do to the schedule, and the key that starts a new one."""
    says = r"of other length, max_epochs: 2 -> 4; .*--force it rises again.*backbone\.weights="
    with pytest.raises(UserError, match=says):
        resume(run, ["max_epochs=4"])


@pytest.mark.fault
def test_what_cannot_be_read_now_keeps_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that answers with an error says nothing of the file."""
    before = sorted(run.iterdir())

    load = torch.load

    def fail(path: Path, **given: Any) -> Any:
        # The one before it can be read.
        if path.name.endswith("ep=1.ckpt"):
            raise OSError(errno.EIO, "Input/output error")
        return load(path, **given)

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(UserError, match=r"ep=1\.ckpt' cannot be read \(Input/output error\)"):
        resume(run)
    assert sorted(run.iterdir()) == before


@pytest.mark.fault
def test_an_optimiser_of_other_groups_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    """Forced, but its state does not fit: one line, and the log is not cut."""
    config = make_config("simclr", optimizer={"name": "lars"}, max_epochs=2)
    run = train(config, tmp_path / "run").run_dir
    logged = (run / METRICS).read_bytes()
    other = dict(config, optimizer={**config["optimizer"], "exclude_bias_n_norm_wd": True})
    with pytest.raises(UserError, match=r"does not fit this method .*parameter group"):
        pretrain(prepare({**other, "max_epochs": 3}), run_dir=run, force=True)
    assert (run / METRICS).read_bytes() == logged


def test_resumed_with_settings_that_change_no_result(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A lost worker's message advises fewer of them; images and teachers may have moved."""
    train_killed(config_of(make_config, "simclr"), tmp_path / "run", 3)
    with pytest.raises(UserError, match=r"of another run: optimizer\.lr: \S+ -> 0\.1; name"):
        resume(tmp_path / "run", ["optimizer.lr=0.1", "data.num_workers=1"])
    forced = shutil.copytree(tmp_path / "run", tmp_path / "forced")
    assert resume(forced, ["optimizer.lr=0.1"], force=True).epochs == 3
    assert read_config(forced)["optimizer"]["lr"] == 0.1
    config = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())
    moved = shutil.copytree(config["data"]["train_path"], tmp_path / "moved")
    resume(tmp_path / "run", ["data.num_workers=1", f"data.train_path={moved}"])
    config = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())
    assert (config["data"]["num_workers"], config["data"]["train_path"]) == (1, str(moved))
