"""Workers started in any way read every data set, with the same numbers."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets as tv
from torchvision.transforms import ToTensor

from solo_ext.config.schema import Augmentation, Batch, Images, RunConfig
from solo_ext.data.images import open_images
from solo_ext.data.indexed import IndexedViews, indexed_eval_loader
from solo_ext.data.loaders import fixed_loader, pretrain_loader
from solo_ext.data.sampler import SampleKey
from solo_ext.data.transforms import pretrain_transform
from solo_ext.data.views import FixedViews, TrainingViews
from solo_ext.data.workers import outlive_signals, worker_context
from solo_ext.host.patches import dataset_with_index
from tests.data.making import same, section
from tests.scripts import run_script

METHODS = ("fork", "spawn", "forkserver")
AUGMENTATION = Augmentation(
    crop_size=8,
    num_crops=2,
    color_jitter={"prob": 0.5, "hue": 0.1},  # type: ignore[arg-type]
    gaussian_blur={"prob": 0.5},  # type: ignore[arg-type]
    solarization={"prob": 0.5},  # type: ignore[arg-type]
    equalization={"prob": 0.5},  # type: ignore[arg-type]
)
SIZE = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six images as class folders, flat, in HDF5, as a saved table, and as CIFAR-10."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (SIZE, 32, 32, 3), dtype=np.uint8)
    files = []
    for index, image in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
        for place in (root / "folder" / "ab"[index // 3], root / "flat"):
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{index}.png").write_bytes(files[-1])
    (root / "folder" / "a" / "0.png").write_bytes(b"")
    _write_h5(root / "images.h5", files)
    _save_table(root / "table", files)
    _write_cifar10(root / "cifar-10-batches-py", pixels)
    return root


def _write_h5(path: Path, files: list[bytes]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as held:
        for index, file in enumerate(files):
            held[f"{'ab'[index // 3]}/{index}"] = np.frombuffer(file, dtype=np.uint8)


def _save_table(path: Path, files: list[bytes]) -> None:
    datasets: Any = pytest.importorskip("datasets")
    table = {"image": [{"bytes": f, "path": None} for f in files], "label": [0, 0, 0, 1, 1, 1]}
    label = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features(image=datasets.Image(), label=label)
    datasets.Dataset.from_dict(table, features=features).save_to_disk(str(path))


def _write_cifar10(folder: Path, pixels: Any) -> None:
    folder.mkdir()
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    for index, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        data = pixels[index : index + 1].transpose(0, 3, 1, 2).reshape(1, -1)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [index]}))


def config(root: Path, **data: Any) -> RunConfig:
    return RunConfig.model_construct(
        seed=5,
        data=section(root / "table", format="huggingface", **data),
        optimizer=Batch(batch_size=2),
        augmentations=[AUGMENTATION],
    )


def sections(root: Path) -> dict[str, Images]:
    return {
        "folder, one image skipped": section(root / "folder", unreadable="skip"),
        "flat": section(root / "flat", no_labels=True),
        "a part": section(root / "images.h5", format="h5", fraction=0.5),
        "h5": section(root / "images.h5", format="h5", no_labels=True),
        "huggingface": section(root / "table", format="huggingface"),
        "cifar10": section(root, dataset="cifar10"),
    }


@pytest.fixture
def parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any]]]:
    """Every data set as every kind of views, and the items to ask them for."""
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda _: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    transform = pretrain_transform("custom", [AUGMENTATION])
    found: list[tuple[Any, Any]] = []
    for data in sections(root).values():
        images = open_images(data, "train")
        views = TrainingViews(images, transform, 3)
        # So that handles are open when a worker is forked.
        views[SampleKey(0, 0)]
        found += [
            (views, [SampleKey(epoch, i) for epoch in (0, 4) for i in (0, 2)]),
            (IndexedViews(views, ToTensor()), [0, 2]),
            (FixedViews(images, ToTensor()), [0, 2]),
        ]
    indexed = dataset_with_index(tv.ImageFolder)(str(root / "folder"), ToTensor())
    return iter([*found, (indexed, [1]), (IndexedViews(indexed, ToTensor()), [1])])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_view_of_every_data_set(
    method: str, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from spawned import Everything, as_they_are  # type: ignore[import-not-found]

    everything = Everything(list(parts))
    loader = DataLoader(
        everything,
        batch_size=7,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=as_they_are,
        generator=torch.Generator(),
    )
    served = [item for batch in loader for item in batch]
    expected = [everything[i] for i in range(len(everything))]
    assert len(served) == len(expected) > 40
    assert same(served, expected)
    assert served[6] is None  # left out of evaluation


@pytest.mark.fault
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of POSIX")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGKILL"])
def test_signals_to_workers_of_a_fixed_pass(
    root: Path, number: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As terminals and clusters send them to all, and the system when memory ends.

    The pass is finished first, in this process where a worker is gone.
    """
    cfg = config(root, num_workers=1)
    # A loader of torch alone installs its handler of SIGCHLD for the whole process.
    list(DataLoader([0], num_workers=1))  # type: ignore[arg-type]
    views = pretrain_loader(cfg, open_images(cfg.data, "train")).dataset
    served: list[int] = []
    for indices, _ in indexed_eval_loader(cfg, views, range(len(views)), 1):
        served += indices.tolist()
        if len(served) == 1:
            (worker,) = multiprocessing.active_children()
            os.kill(int(worker.pid or 0), signal.Signals[number])
    assert served == list(range(len(views)))
    assert ("a data worker was killed (SIGKILL)" in caplog.text) is (number == "SIGKILL")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of POSIX")
def test_workers_outlive_signals_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An E-step or an evaluation may go on for hours after one."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from spawned import Handlers

    held = list(DataLoader(Handlers(), num_workers=1, worker_init_fn=outlive_signals))
    assert [int(found) for found in held] == [signal.SIG_IGN] * 3


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("end", ["exit", "kill -9"])
@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_the_program(method: str, end: str, tmp_path: Path) -> None:
    """In the midst of a pass that nobody finishes; it is waited for all that hold its output."""
    script = Path(__file__).with_name("unfinished_pass.py")
    run_script(script, tmp_path, method, end, timeout=200, fails=end == "kill -9")
    assert (tmp_path / "said").read_text() == "a batch\n"


def test_loaders_take_the_setting(root: Path) -> None:
    cfg = config(root, num_workers=1, start_method="spawn")
    images = open_images(cfg.data, "train")
    made = pretrain_loader(cfg, images)
    loaders: list[Any] = [
        made,
        fixed_loader(cfg, images),
        indexed_eval_loader(cfg, made.dataset, [0], 1),
    ]
    for loader in loaders:
        assert loader.multiprocessing_context.get_start_method() == "spawn"
    cfg.data.num_workers = 0
    assert pretrain_loader(cfg, images).multiprocessing_context is None
    assert worker_context(2, None) is None
