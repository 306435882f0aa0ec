"""Runs over images of which some cannot be read, vanish, come while it trains, or are alike."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.core.files import read_jsonl
from solo_ext.data.reading import UnreadableImage, name_of
from solo_ext.lab.cli.main import main
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.lab.training.watch import UNREADABLE
from tests.conftest import MakeConfig
from tests.lab.training.same_run import (
    assert_same_run,
    command_of,
    final,
    same_weights,
    train,
    weights,
)

pytestmark = pytest.mark.fault
BROKEN = {"0/3.png": "it is empty", "0/15.png": "no image", "1/0.png": "a link", "2/9.png": "trunc"}


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A copy of the images, to be changed."""
    return Path(shutil.copytree(images, tmp_path / "images"))


@pytest.fixture
def faulty(folder: Path) -> Path:
    """The copy with four faults, two of them next to each other."""
    (folder / "0" / "3.png").write_bytes(b"")
    (folder / "0" / "15.png").write_text("no image")
    (folder / "1" / "0.png").unlink()
    (folder / "1" / "0.png").symlink_to("nowhere.png")
    whole = (folder / "2" / "9.png").read_bytes()
    (folder / "2" / "9.png").write_bytes(whole[: len(whole) // 2])
    return folder


def data(folder: Path, **given: Any) -> dict[str, Any]:
    return {"train_path": str(folder), "unreadable": "skip", **given}


def named(run_dir: Path, root: Path) -> set[str]:
    lines = read_jsonl(run_dir / UNREADABLE)
    found = {line["image"]: line["reason"] for line in lines}
    assert len(found) == len(lines)
    names = {str(Path(name).relative_to(root)) for name in found}
    for name in names:
        assert BROKEN.get(name, "") in found[str(root / name)]
    return names


def test_skipped_ones_are_named_and_counted(
    make_config: MakeConfig, faulty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same with workers, and with validation over the same images."""
    given = data(faulty, val_path=str(faulty))
    runs = []
    for workers in (0, 2):
        config = make_config("simclr", data={**given, "num_workers": workers}, max_epochs=2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "solo_ext"):
            runs.append(train(config, tmp_path / f"run-{workers}").run_dir)
        warned = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
        assert warned == [
            f"4 images cannot be read and are left out, named in {runs[-1] / UNREADABLE}"
        ]
        assert named(runs[-1], faulty) == set(BROKEN)
    assert same_weights(*runs)
    record = evaluate(runs[0], "knn", {"k": [1]})
    for split in ("train", "test"):
        assert record[split]["images"] == 44
        assert {str(Path(n).relative_to(faulty)) for n in record[split]["unreadable"]} == set(
            BROKEN
        )


STAND_INS = {"0/3": "0/4", "0/15": "0/2", "1/0": "1/1", "2/9": "0/0"}
"""In the order of their names, from the last to the first."""


@pytest.mark.parametrize("kwargs", [{}, {"e_step": "bank"}])
def test_clusters_are_those_of_the_stand_ins(
    kwargs: dict[str, Any], make_config: MakeConfig, faulty: Path, tmp_path: Path
) -> None:
    """The E-step before the first epoch sees an image for every index, at its index."""
    config = make_config("pcl", method_kwargs=kwargs, data=data(faulty))
    train(config, tmp_path / "skipping")
    for name, instead in STAND_INS.items():
        (faulty / f"{name}.png").unlink()
        shutil.copy(faulty / f"{instead}.png", faulty / f"{name}.png")
    train(config, tmp_path / "copied")
    assert not (tmp_path / "copied" / UNREADABLE).exists()
    found = [weights(tmp_path / run)["prototypes.assignments"] for run in ("skipping", "copied")]
    assert found[0].shape == (2, 48)
    assert torch.equal(*found)


class _Remove(Callback):
    """Removes a file before an epoch."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.path.rename(self.path.with_suffix(".gone"))


@pytest.mark.slow
def test_a_file_that_vanishes_ends_the_run(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """The last step is saved, and once the file is back the run goes on as if nothing was."""
    given = data(folder, unreadable="refuse", num_workers=2)
    config = make_config("simclr", data=given, max_epochs=3)
    train(config, tmp_path / "whole")
    lost = folder / "1" / "7.png"
    with pytest.raises(UnreadableImage) as caught:
        train(config, tmp_path / "run", callbacks=[_Remove(lost, 1)])
    expected = f"image {str(lost)!r} cannot be read: it is not there; mend or remove it"
    assert str(caught.value).startswith(expected)
    assert [c.epoch for c in checkpoints(tmp_path / "run")] == [1]
    lost.with_suffix(".gone").rename(lost)
    resume(tmp_path / "run")
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_file_that_vanishes_is_skipped_from_then_on(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    lost = folder / "1" / "7.png"
    config = make_config("simclr", data=data(folder), max_epochs=3)
    result = train(config, tmp_path / "run", callbacks=[_Remove(lost, 1)])
    assert result.epochs == 3
    assert named(tmp_path / "run", folder) == {"1/7.png"}


@pytest.mark.slow
def test_the_command_ends_with_one_line(
    make_config: MakeConfig,
    faulty: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config("simclr", data=data(faulty, unreadable="refuse", num_workers=2))
    assert main(command_of(config, tmp_path, tmp_path / "run")) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("solo-ext: ")]
    assert (out, len(lines)) == ("", 1)
    assert "Traceback" not in err
    assert lines[0].startswith(f"solo-ext: image '{faulty}/")
    assert not (tmp_path / "run" / UNREADABLE).exists()
    # Evaluation says the same, also of a run that skipped them.
    words = command_of(config, tmp_path, tmp_path / "skipped")
    assert main([*words, "data.unreadable=skip"]) == 0
    capsys.readouterr()
    both = [f"data.train_path={faulty}", f"data.val_path={faulty}"]
    command = ["eval", "knn", str(tmp_path / "skipped"), *both]
    assert main([*command, "data.unreadable=refuse"]) == 2
    assert "0/15.png' cannot be read" in capsys.readouterr().err
    assert main(command) == 0
    assert "4 of 48 images of train cannot be read" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers"), [("pcl", 2), ("simclr", 0)])
def test_duplicates_that_come_while_it_trains_change_nothing(
    method: str, workers: int, make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """Indices, order and labels are of what was there at the start; resuming tells of the rest."""
    data = {"train_path": str(folder), "num_workers": workers}
    config = make_config(method, data=data, max_epochs=3)
    train(config, tmp_path / "whole")

    def copy(trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            shutil.copy(folder / "1" / "7.png", folder / "1" / "00.png")
            shutil.copy(folder / "1" / "7.png", folder / "0" / "00.png")

    come = LambdaCallback(on_train_epoch_start=copy)
    train(config, tmp_path / "run", callbacks=[come])
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    with pytest.raises(UserError, match="training images: 48 -> 50"):
        resume(tmp_path / "run")


def test_images_that_are_there_more_than_once(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """Equal images fall into equal clusters, and nothing is divided by their distance."""
    times = 8
    for image in sorted(folder.rglob("*.png")):
        if int(image.stem) >= 16 // times:
            image.unlink()
            continue
        for number in range(1, times):
            shutil.copy(image, image.with_name(f"{image.stem}-{number}.png"))
    config = make_config("pcl", data={"train_path": str(folder)}, max_epochs=2)
    prepared = prepare(config)
    pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    held = final(tmp_path / "run")["state_dict"]
    assert all(v.isfinite().all() for v in held.values() if isinstance(v, torch.Tensor))
    order = sorted(range(48), key=lambda index: _original(prepared.train, index))
    clusters = held["prototypes.assignments"][:, order].unflatten(1, (-1, times))
    assert (clusters == clusters[..., :1]).all()
    assert len(clusters[0].unique()) == 3


def _original(images: Any, index: int) -> str:
    path = Path(name_of(images, index))
    return f"{path.parent.name}/{path.stem.partition('-')[0]}"
