"""Links are never written through, nor followed out of one file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, refuse_link, write_text
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.experiments.records import RECORDS
from solo_ext.lab.training.run_dir import EPOCHS, METRICS
from solo_ext.lab.training.watch import add_lines
from tests.data.making import opened, refused
from tests.lab.training.same_run import train

MakeConfig = Callable[..., dict[str, Any]]
PRECIOUS = "not to be touched"


@pytest.fixture
def precious(tmp_path: Path) -> Any:
    """A file of the user's, which must be as it was when the test ends."""
    file = tmp_path / "home" / ".profile"
    file.parent.mkdir()
    file.write_text(PRECIOUS)
    yield file
    assert file.read_text() == PRECIOUS
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("name", [METRICS, EPOCHS])
def test_a_file_that_grows(
    name: str, make_config: MakeConfig, tmp_path: Path, precious: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(precious)
    with pytest.raises(UserError, match=r"is a link to .* remove it"):
        train(make_config("simclr"), run)


def test_what_a_run_writes_anew(make_config: MakeConfig, tmp_path: Path, precious: Path) -> None:
    """Files that are written whole take the place of the link."""
    run = tmp_path / "run"
    run.mkdir()
    names = ("config.yaml", "args.json", "environment.json")
    for name in names:
        (run / name).symlink_to(precious)
    data = {"val_path": make_config("simclr")["data"]["train_path"]}
    train(make_config("simclr", data=data), run)
    assert not any((run / name).is_symlink() for name in names)
    for name in ("eval_knn.json", "finetune.safetensors", "features"):
        (run / name).symlink_to(precious)
    evaluate(str(run), "knn", {"device": "cpu", "k": [1]})


def test_scratch_file(tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be foreseen, where others may write to the folder."""
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    (tmp_path / f".a.json.host-{os.getpid()}.saving").symlink_to(precious)
    write_text(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}"


def test_files_that_grow(tmp_path: Path, precious: Path) -> None:
    for name in (RECORDS, "unreadable.jsonl"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(UserError, match="is a link"):
        append_lines(tmp_path / RECORDS, [])
    with pytest.raises(UserError, match="is a link"):
        add_lines(tmp_path / "unreadable.jsonl", {"a": "b"})


def test_a_link_that_leads_nowhere_is_one(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match="is a link"):
        refuse_link(tmp_path / "a")
    assert refuse_link(tmp_path / "b") == tmp_path / "b"


@pytest.fixture
def elsewhere(tmp_path: Path, images: Path) -> Path:
    """An image outside of the HDF5 file, as a file and in another HDF5 file."""
    h5py = pytest.importorskip("h5py")
    content = (images / "0" / "0.png").read_bytes()
    (tmp_path / "secret.png").write_bytes(content)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["class0/0.png"] = np.frombuffer(content, dtype=np.uint8)
    return tmp_path


@pytest.mark.parametrize("kind", ["link", "pipe", "storage", "virtual"])
@pytest.mark.timeout(60)
def test_images_of_hdf5_come_out_of_the_file(kind: str, elsewhere: Path) -> None:
    h5py = pytest.importorskip("h5py")
    file = elsewhere / "images.h5"
    size = (elsewhere / "secret.png").stat().st_size
    with h5py.File(file, "w") as content:
        group = content.create_group("class0")
        match kind:
            case "link":
                group["0.png"] = h5py.ExternalLink(str(elsewhere / "secret.h5"), "class0/0.png")
            case "pipe":
                # Whoever opens it waits for a writer.
                os.mkfifo(elsewhere / "pipe")
                group["0.png"] = h5py.ExternalLink(str(elsewhere / "pipe"), "class0/0.png")
            case "storage":
                place = [(str(elsewhere / "secret.png"), 0, size)]
                group.create_dataset("0.png", (size,), dtype=np.uint8, external=place)
            case "virtual":
                source = h5py.VirtualSource(str(elsewhere / "secret.h5"), "class0/0.png", (size,))
                layout = h5py.VirtualLayout((size,), dtype=np.uint8)
                layout[:] = source
                group.create_virtual_dataset("0.png", layout)
    with pytest.raises(UserError, match=r"not the bytes of an image file|is a link"):
        opened(file, format="h5")[0]


@pytest.mark.parametrize("name", ["secret.h5", "pipe"])
@pytest.mark.timeout(60)
def test_classes_of_hdf5_are_in_the_file(name: str, elsewhere: Path) -> None:
    h5py = pytest.importorskip("h5py")
    os.mkfifo(elsewhere / "pipe")
    with h5py.File(elsewhere / "images.h5", "w") as file:
        file["class0"] = h5py.ExternalLink(str(elsewhere / name), "class0")
    refused("'class0' is a link", elsewhere / "images.h5", format="h5")
