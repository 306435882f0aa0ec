"""Workers started in any way read every data set, with the same numbers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.transforms import ToTensor

from solo_ext.config.schema import Augmentation, RunConfig
from solo_ext.data.images import open_images
from solo_ext.data.loaders import EvalViews, eval_batches, fixed_loader, pretrain_loader
from solo_ext.data.transforms import pretrain_transform
from solo_ext.data.views import FixedViews, SampleKey, TrainingViews
from tests.data.making import opened, png, run_of, same, save_table, section, write_folder, write_h5
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six images as class folders, in HDF5, and as a saved table."""
    root = tmp_path_factory.mktemp("data")
    files = [png(20 * index) for index in range(6)]
    write_folder(root / "folder", [b"", *files[1:]])
    write_h5(root / "images.h5", files)
    save_table(root / "table", files)
    return root


def config(root: Path, **data: Any) -> RunConfig:
    return run_of(section(root / "table", format="huggingface", **data), 2, AUGMENTATION)


@pytest.fixture
def parts(root: Path) -> list[Any]:
    """Some items of every data set as every kind of views."""
    transform = pretrain_transform("custom", [AUGMENTATION])
    found: list[Any] = []
    for images in (
        opened(root / "folder", unreadable="skip"),
        opened(root / "images.h5", format="h5", fraction=0.5),
        opened(root / "images.h5", format="h5", no_labels=True),
        opened(root / "table", format="huggingface"),
    ):
        views = TrainingViews(images, transform, 3)
        # So that handles are open when a worker is forked.
        views[SampleKey(0, 0)]
        found += [
            Subset(views, [SampleKey(epoch, i) for epoch in (0, 4) for i in (0, 2)]),  # type: ignore[misc]
            Subset(EvalViews(views, ToTensor()), [0, 2]),
            Subset(FixedViews(images, ToTensor()), [0, 2]),
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_view_of_every_data_set(method: str, parts: list[Any], tmp_path: Path) -> None:
    everything: Any = ConcatDataset(parts)
    if method == "forkserver":
        # The fork server of a fork has torch at once; a spawned worker shows that it imports it.
        (tmp_path / "given").write_bytes(pickle.dumps(everything))
        script = Path(__file__).with_name("pickled_pass.py")
        run_script(script, tmp_path, method, timeout=200)
        served = pickle.loads((tmp_path / "served").read_bytes())
    else:
        loader = DataLoader(
            everything, 7, num_workers=1, multiprocessing_context=method, collate_fn=list
        )
        served = [item for batch in loader for item in batch]
    expected = [everything[i] for i in range(len(everything))]
    assert len(served) == len(expected) == 32
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
    served = 0
    others = set(multiprocessing.active_children())
    for batch in eval_batches(cfg, views, range(len(views)), 1):
        served += len(batch)
        if served == 1:
            (worker,) = set(multiprocessing.active_children()) - others
            os.kill(int(worker.pid or 0), signal.Signals[number])
    assert served == len(views)
    assert ("a data worker was killed (SIGKILL)" in caplog.text) is (number == "SIGKILL")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("end", ["exit", "kill -9"])
@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_the_program(method: str, end: str, tmp_path: Path) -> None:
    """In the midst of a pass that nobody finishes; it is waited for all that hold its output."""
    script = Path(__file__).with_name("unfinished_pass.py")
    run_script(script, tmp_path, method, end, timeout=200, fails=end == "kill -9")
    assert (tmp_path / "said").read_text() == "a batch\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
def test_other_children_of_the_program_end_as_they_like(tmp_path: Path) -> None:
    """Python sends them SIGTERM; the import alone changes nothing of that."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing, signal, sys, time
from pathlib import Path
import solo_ext.data.workers

def ended(*_):
    Path("ended").touch()
    sys.exit()

def child(ready):
    signal.signal(signal.SIGTERM, ended)
    ready.set()
    time.sleep(60)

context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=child, args=(ready,), daemon=True).start()
ready.wait()
"""
    )
    run_script(script, tmp_path, timeout=100)
    assert (tmp_path / "ended").exists()


def test_loaders_take_the_setting(root: Path) -> None:
    cfg = config(root, num_workers=1, start_method="spawn")
    images = open_images(cfg.data, "train")
    made = pretrain_loader(cfg, images)
    loaders: list[Any] = [made, fixed_loader(cfg, images), eval_batches(cfg, made.dataset, [0], 1)]
    for loader in loaders:
        assert loader.multiprocessing_context.get_start_method() == "spawn"
    cfg.data.num_workers = 0
    assert pretrain_loader(cfg, images).multiprocessing_context is None
