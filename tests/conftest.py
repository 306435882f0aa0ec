"""A host, a few images, and configs of runs that take a second."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Tests run in several processes: threads would fight for their cores, and spinning ones make busy
# cores ten times slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What a shell starts in the background ignores Ctrl-C, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch

# Without a GPU, Triton's kernels run on CPU tensors; read when Triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig
from PIL import Image

from solo_ext import host
from solo_ext.config import compose
from solo_ext.core.files import config_root
from solo_ext.lab.training import prepare as preparing
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests import forks

CLASSES, PER_CLASS, SIDE, BATCH = 3, 16, 16, 24
KWARGS: dict[str, dict[str, Any]] = {
    "all4one": {"temperature": 0.2, "pred_hidden_dim": 16, "queue_size": 48},
    "barlow_twins": {},
    "byol": {"pred_hidden_dim": 16},
    "deepclusterv2": {"num_prototypes": [4, 4], "kmeans_iters": 2},
    "dino": {"num_prototypes": 16},
    "hard_negative": {},
    "metric": {"loss": "triplet_loss_func"},
    "mochi": {
        "queue_size": 48,
        "mixing": {
            "num_hard": 12,
            "num_pair_mixes": 8,
            "num_query_mixes": 4,
            "warmup_epochs": 0,
        },
    },
    "mocov2plus": {"temperature": 0.2, "queue_size": 48},
    "mocov3": {"temperature": 0.2, "pred_hidden_dim": 16},
    "nnbyol": {"pred_hidden_dim": 16, "queue_size": 48},
    "nnclr": {"temperature": 0.2, "pred_hidden_dim": 16, "queue_size": 48},
    "nnclr_symmetric": {"pred_hidden_dim": 16, "support_set": {"size": 30, "exclude_own": True}},
    "nnsiam": {"pred_hidden_dim": 16, "queue_size": 48},
    "pcl": {"queue_size": 48, "num_prototypes": [3, 6], "warmup_epochs": 0},
    "protocpc": {"num_prototypes": 20},
    "protoseed": {"num_prototypes": 20},
    "ressl": {"temperature_q": 0.1, "temperature_k": 0.04, "queue_size": 48},
    "seed": {"queue_size": 30, "teacher_temperature": 0.05},
    "simclr": {"temperature": 0.2},
    "simsiam": {"pred_hidden_dim": 16},
    "supcon": {"temperature": 0.2},
    "swav": {
        "temperature": 0.1,
        "queue_size": 48,
        "num_prototypes": 8,
        "epoch_queue_starts": 0,
        "freeze_prototypes_epochs": 0,
    },
    "vibcreg": {},
    "vicreg": {},
    "wmse": {"whitening_size": 24, "whitening_eps": 0.1},
}
"""``method_kwargs`` without the sizes of the projector."""
DISTILLATION = ("protoseed", "seed")
"""Their heads have the sizes of the teacher's."""

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Hydra composes a shipped config, whose files stay, once in a process: it takes 0.1 s."""
    made: dict[Any, DictConfig] = {}
    composed = compose._composed

    def once(root: Path, name: str, groups: Sequence[Override]) -> DictConfig:
        if root != config_root():
            return composed(root, name, groups)
        key = name, tuple(group.input_line for group in groups)
        if key not in made:
            made[key] = composed(root, name, groups)
        return copy.deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_composed", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _tried_once() -> Iterator[None]:
    """A backbone that takes its arguments and crops is tried once in a process: it takes 0.07 s."""
    found: dict[str, Any] = {}
    tried = preparing._check_backbone

    def once(loaded: host.Host, run: Any) -> Any:
        sizes = [crop.crop_size for crop in run.augmentations]
        key = repr((run.method, run.data.dataset, run.backbone, sizes))
        if key not in found:
            layers = tried(loaded, run)
            found[key] = layers, run.backbone.kwargs
        layers, kwargs = found[key]
        run.backbone.kwargs = copy.deepcopy(kwargs)
        return layers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_check_backbone", once)
        yield


@pytest.fixture(scope="session")
def loaded() -> host.Host:
    """The installed host, with the patches that change no number."""
    return host.load()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As :func:`made_images`."""
    return made_images(tmp_path_factory.mktemp("images"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts the skipped tests by reason, in one line; `-rs` names each."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped (-rs names each): {listed}")


def need_method(name: str) -> None:
    """Skips a test of a method that only solo-learn's main branch has."""
    if name not in host.load().methods and name in BUILTIN_KWARGS:
        pytest.skip(f"solo-learn {host.load().info.generation} does not have {name}")


def made_images(
    root: Path, classes: Iterable[Any] = range(CLASSES), count: int = PER_CLASS, seed: int = 0
) -> Path:
    """Class folders ``0``, ``1``, ``2`` of 16 random images of 16 x 16 each, or others."""
    rng = np.random.default_rng(seed)
    for label in classes:
        folder = root / str(label)
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Every line of a file, where ``read_jsonl`` would skip one that is no JSON."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def packed(folder: Path, file: Path) -> Path:
    """Class folders in one HDF5 file, as solo-learn has them."""
    h5py = pytest.importorskip("h5py")
    # It may be open still.
    file.unlink(missing_ok=True)
    with h5py.File(file, "w") as opened:
        for image in sorted(folder.glob("*/*")):
            content = np.frombuffer(image.read_bytes(), dtype=np.uint8)
            opened[f"{image.parent.name}/{image.name}"] = content
    return file


@pytest.fixture(scope="session")
def make_config(images: Path) -> MakeConfig:
    """``make(method, section={...}, ...)``: as :func:`tiny_config`."""
    return functools.partial(tiny_config, images)


def tiny_config(images: Path, method: str, **changes: Any) -> dict[str, Any]:
    """Two steps per epoch of a tiny network, on the CPU; changes of sections are added to them."""
    config: dict[str, Any] = {
        "name": "tiny",
        "method": method,
        "backbone": {
            "name": "timm/resnet10t",
            "kwargs": {"channels": [8, 8, 8, 8], "small_stem": False},
        },
        "method_kwargs": {**_sizes(method), **KWARGS.get(method, {})},
        "data": {
            "dataset": "custom",
            "train_path": str(images),
            "val_path": None,
            "num_workers": 0,
        },
        "augmentations": [{"crop_size": SIDE, "num_crops": 2}],
        "optimizer": {"name": "sgd", "batch_size": BATCH, "lr": 0.3, "classifier_lr": 0.1},
        "scheduler": {"name": "none"},
        "loggers": [],
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_progress_bar": False,
    }
    for key, value in changes.items():
        held = config.get(key)
        config[key] = {**held, **value} if isinstance(held, dict) else value
    return config


def _sizes(method: str) -> dict[str, int]:
    return {} if method in DISTILLATION else {"proj_hidden_dim": 16, "proj_output_dim": 8}


@pytest.fixture(scope="session")
def teacher(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory: an epoch of solo-learn's SwAV, a wider network, 8 dimensions."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    backbone = {"kwargs": {"channels": [16, 16, 16, 16], "small_stem": False}}
    config = make_config("swav", backbone=backbone, seed=7)
    pretrain(prepare(config), run_dir=folder, show_progress=False)
    return folder


@pytest.fixture(scope="session")
def make_distilled(make_config: MakeConfig, teacher: Path) -> MakeConfig:
    """As ``make_config``, for a method that has a teacher; one view of each image."""

    def make(method: str, **changes: Any) -> dict[str, Any]:
        kwargs = changes.pop("method_kwargs", {})
        section = {"path": str(teacher), **kwargs.pop("teacher", {})}
        changes.setdefault("augmentations", [{"crop_size": SIDE, "num_crops": 1}])
        return make_config(method, method_kwargs={**kwargs, "teacher": section}, **changes)

    return make


@pytest.fixture(scope="session")
def in_processes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Any], list[dict[str, Any]]]:
    """``in_processes(module, n)``: what ``module.run`` saved as each of n processes.

    ``module.RANKS`` is n, here and in the processes.
    """

    def compute(module: Any, count: int = 2) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        module.RANKS = count
        code = (
            "import runpy, sys; runpy.run_path(sys.argv[1])['run'](int(sys.argv[2]), sys.argv[3])"
        )
        env = {**os.environ, "RANKS": str(count)}
        started = [
            forks.start("-c", code, module.__file__, rank, folder, env=env) for rank in range(count)
        ]
        for one in started:
            _, said = one.communicate(400)
            assert one.returncode == 0, said[-3000:]
        return [torch.load(folder / f"{rank}.pt") for rank in range(count)]

    return compute
