"""Both generations train alike: the same losses from the same seed and config.

Needs a checkout of main; the other generation runs in a process of its own::

    python tests/host/test_parity.py < configs.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from solo_ext import host
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

ROOT = os.environ.get("SOLO_LEARN_ROOT", "")
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(
        not (Path(ROOT) / "solo" / "backbones").is_dir(),
        reason="SOLO_LEARN_ROOT names no checkout of solo-learn's main branch",
    ),
]
STEPS = 4
METHODS = (
    *("byol", "debiased", "deepclusterv2", "dino", "hard_negative", "metric", "mochi"),
    *("mocov2plus", "nnclr", "nnclr_symmetric", "pcl", "simclr", "simsiam"),
)
Results = dict[str, Any]


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def train(configs: dict[str, dict[str, Any]]) -> Results:
    """Losses of every step of every config, and the names and shapes of what is saved."""
    results: Results = {"generation": host.load().info.generation}
    for name, config in configs.items():
        losses = Losses()
        prepared = prepare(config)
        with tempfile.TemporaryDirectory() as folder:
            pretrain(prepared, run_dir=Path(folder), callbacks=[losses])
        state = prepared.method(prepared.cfg).state_dict()
        shapes = {k: list(v.shape) for k, v in state.items()}
        results[name] = {"losses": losses.seen, "shapes": shapes}
    return results


def train_elsewhere(configs: dict[str, dict[str, Any]], generation: str) -> Results:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if generation == "main":
        env["PYTHONPATH"] = ROOT
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
        check=False,
    )
    if "solo-learn is not installed" in done.stderr:
        pytest.skip(f"solo-learn {generation} is not installed beside this one")
    assert done.returncode == 0, done.stderr
    results: Results = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def both(loaded: host.Host, make_config: Any) -> tuple[Results, Results]:
    """Results of this process's generation, and of the other."""
    configs = {
        name: make_config(
            name,
            max_epochs=STEPS // 2,
            optimizer={"lr": 0.3, "weight_decay": 1e-4, "kwargs": {"momentum": 0.9}},
            scheduler={"name": "warmup_cosine", "warmup_epochs": 1},
        )
        for name in (*METHODS, "swav")
    }
    other = "1.0.2" if loaded.info.generation == "main" else "main"
    here, there = train(configs), train_elsewhere(configs, other)
    assert (here.pop("generation"), there.pop("generation")) == (loaded.info.generation, other)
    return here, there


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_checkpoints_are_the_same(both: tuple[Results, Results], name: str) -> None:
    """Names and shapes of what is saved too, so that either generation reads the other's."""
    here, there = (results[name]["losses"] for results in both)
    assert len(here) == len(there) == STEPS
    assert here[0] == pytest.approx(there[0], rel=1e-4), "from the same weights"
    assert here == pytest.approx(there, rel=1e-3), "and after steps"
    assert len(set(here)) == STEPS
    assert both[0][name]["shapes"] == both[1][name]["shapes"]


def test_swav_is_another_method(both: tuple[Results, Results]) -> None:
    """main fixes the norms of the prototypes at 1; the release leaves them as drawn."""
    here, there = (results["swav"]["losses"] for results in both)
    assert here[0] != pytest.approx(there[0], rel=1e-2)


if __name__ == "__main__":
    print(json.dumps(train(json.load(sys.stdin))))
