"""``torchrun solo-ext eval``: two real processes, and what they leave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from solo_ext.lab.evaluation.suite import evaluate_suite
from tests import forks

TRAIN, VAL, CLASSES, SIDE = 8200, 60, 4, 8
"""More images to train on than one file of stored features holds, so that both processes work."""
MODEL = "timm/resnet10t"
SUITE: dict[str, Any] = {
    "protocols": ["knn", "linear", "retrieval", "clustering"],
    "knn": {"k": [1, 20], "temperature": [0.1]},
    "linear": {"weight_decay": [0.1, 1.0]},
    "clustering": {"restarts": 1, "seeds": 1},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small network with drawn weights, and class folders whose classes differ in colour."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    colours = rng.integers(96, 160, (CLASSES, 3))
    for split, count in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            (root / split / str(label)).mkdir(parents=True)
        for index in range(count):
            noise = rng.normal(0, 60, (SIDE, SIDE, 3))
            pixels = (colours[index % CLASSES] + noise).clip(0, 255).astype(np.uint8)
            place = root / split / str(index % CLASSES) / f"{index:04d}.png"
            Image.fromarray(pixels).save(place, compress_level=0)
    return {
        "data": {f"{split}_path": str(root / split) for split in ("train", "val")},
        "pretrained": False,
        "model_kwargs": {"channels": [8, 8, 8, 8]},
        "crop_size": SIDE,
        "batch_size": 256,
        "num_workers": 0,
        "device": "cpu",
    }


def words(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings as overrides of a command line."""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += words(value, f"{prefix}{key}.")
        else:
            plain = json.dumps(value).replace('"', "") if isinstance(value, list) else value
            found.append(f"{prefix}{key}={plain}")
    return found


def torchrun(protocol: str, settings: dict[str, Any], cwd: Path) -> Any:
    """``torchrun --nproc_per_node 2 solo-ext eval PROTOCOL --json``."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = (*forks.SOLO_EXT, "eval", protocol, MODEL, "--json")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forks.run(*launcher, *command, *words(settings), cwd=cwd, env=env, timeout=300)


@pytest.mark.slow
def test_two_processes_measure_what_one_does(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite that extracts; a mistake ends both."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    alone = evaluate_suite(MODEL, {**settings, **SUITE})

    done = torchrun("suite", {**settings, **SUITE}, folders[1])
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout)
    assert results(record) == results(alone)
    assert [entry["status"] for entry in record["entries"]] == 4 * ["done"]
    written = [sorted(p.relative_to(f).parts for p in f.rglob("*.*")) for f in folders]
    (place,) = folders[1].glob("evaluations/*")
    assert json.loads((place / "eval_suite.json").read_text()) == record
    assert written[0] == written[1]
    assert len(list(place.rglob("*-of-00002.safetensors"))) == 2


def results(record: dict[str, Any]) -> dict[str, Any]:
    return {entry["protocol"]: entry["results"] for entry in record["entries"]}
