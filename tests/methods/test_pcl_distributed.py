"""Two processes agree with one: the E-step, the bank under DDP, and whole runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from solo_ext.config.compose import compose
from solo_ext.data.sampler import EpochSampler
from solo_ext.methods import PCL
from solo_ext.training.prepare import prepare

HERE = Path(__file__).parent
# Spawned processes find the module by its name, on the path that they inherit.
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("pcl_two_ranks")
sys.path.remove(str(HERE))

SMALL = [
    "max_epochs=1",
    "method_kwargs.warmup_epochs=0",
    "method_kwargs.e_step=bank",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "accelerator=cpu",
    "limit_train_batches=2",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes computed."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        multiprocessing.spawn(ranks.run, (str(folder),), nprocs=ranks.RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks.RANKS)]


def test_e_step_of_two_ranks_is_that_of_one(results: list[dict[str, Any]]) -> None:
    """To the last bit, cold and warm, with empty and single clusters."""
    alone = ranks.steps(torch.arange(ranks.SAMPLES))
    for result in results:
        for found, expected in zip(result["steps"], alone, strict=True):
            for one, two in zip(found, expected, strict=True):
                for name, value in vars(two).items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(one[name], value), name
                    else:
                        assert one[name] == value, name
    assert alone[0][2].singletons > 200


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_leaves_the_bank_alone(results: list[dict[str, Any]], rank: int) -> None:
    """Rows that one rank alone has written are still there after a forward pass."""
    own = torch.arange(rank, ranks.SAMPLES, ranks.RANKS)
    held = results[rank]["bank"]
    assert torch.equal(held["value"][own], ranks.features()[own])
    assert held["filled"].nonzero().squeeze(1).tolist() == own.tolist()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Checkpoints of the same run in one process and in two."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for devices, batch in ((1, 60), (2, 30)):
        command = [sys.executable, "-m", "solo_ext.cli.main", "pretrain", "--config-name"]
        command += ["digits/pcl", *SMALL, f"devices={devices}", f"optimizer.batch_size={batch}"]
        command += ["--run-dir", str(root / str(devices))]
        if devices > 1:
            command.append("strategy=ddp")
        environment = {**os.environ, "SOLO_EXT_DATA": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, cwd=root
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (checkpoint,) = (root / str(devices)).glob("*.ckpt")
        found[devices] = torch.load(checkpoint, weights_only=True)["state_dict"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(root))
        found[0] = {"prepared": prepare(compose("digits/pcl", SMALL))}
    return found


def test_run_of_two_ranks_clusters_alike(runs: dict[int, dict[str, Any]]) -> None:
    """Before the first step: the same weights, hence the same features and clusters."""
    one, two = runs[1], runs[2]
    assert one["prototypes.assignments"].shape == (3, 280)
    assert torch.equal(one["prototypes.assignments"], two["prototypes.assignments"])
    for m in range(3):
        for name in ("means", "prototypes", "concentration"):
            key = f"prototypes.{name}_{m}"
            torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)


def test_bank_and_queue_hold_the_keys_of_both_ranks(runs: dict[int, dict[str, Any]]) -> None:
    seed = runs[0]["prepared"].given["seed"]
    shares = [[s.sample for s in EpochSampler(280, seed, 2, rank)][:60] for rank in (0, 1)]
    filled = runs[2]["bank.filled"].nonzero().squeeze(1).tolist()
    assert filled == sorted(shares[0] + shares[1])
    norms = runs[2]["bank.value"].norm(dim=1)
    torch.testing.assert_close(norms, runs[2]["bank.filled"].float())
    # Step by step, rank by rank; the bank holds the mean of both views' keys.
    order = [shares[rank][step * 30 : step * 30 + 30] for step in (0, 1) for rank in (0, 1)]
    keys = [runs[2][f"queues.{view}.value"][:120] for view in (0, 1)]
    mean = torch.nn.functional.normalize(torch.stack(keys).mean(0), dim=1)
    rows = [sample for part in order for sample in part]
    torch.testing.assert_close(runs[2]["bank.value"][rows], mean)
    assert runs[2]["queues.0._extra_state"].tolist() == [120]


def test_loss_of_two_ranks_is_that_of_one(runs: dict[int, dict[str, Any]]) -> None:
    """Given the features: the mean over the ranks' halves, in value and gradient."""
    method = PCL(runs[0]["prepared"].cfg)
    method.load_state_dict(runs[1])
    generator = torch.Generator().manual_seed(0)
    z = [torch.randn(40, 128, generator=generator) for _ in range(4)]
    queries = [x.clone().requires_grad_() for x in z[:2]]
    indices = torch.randperm(280, generator=generator)[:40]
    whole, _ = method.contrast(queries, z[2:], indices)
    expected = torch.autograd.grad(whole, queries)
    halves = (slice(0, 20), slice(20, 40))
    parts = [
        method.contrast([q[h] for q in queries], [k[h] for k in z[2:]], indices[h])[0]
        for h in halves
    ]
    mean = torch.stack(parts).mean()
    torch.testing.assert_close(mean, whole)
    for one, two in zip(torch.autograd.grad(mean, queries), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
