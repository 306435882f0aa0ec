"""Two processes agree with one: losses of given features, state, and whole runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scripts import run_script

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., dict[str, Any]]
Noted = dict[str, list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
script: Any = importlib.import_module("contrastive_run")
sys.path.remove(str(HERE))

BATCH = 24
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
FIXED_CROPS = [
    {"rrc": {"enabled": False}, "crop_size": 16, "num_crops": 1},
    {"rrc": {"enabled": False}, "solarization": {"prob": 1.0}, "crop_size": 16, "num_crops": 1},
    {"rrc": {"enabled": False}, "crop_size": 8, "num_crops": 1},
]
NO_BATCH_NORM = {"proj_batch_norm": False, "proj_last_batch_norm": False}
MIXES = {"num_hard": 12, "num_pair_mixes": 8, "num_query_mixes": 4, "warmup_epochs": 0}
SUPPORT = {"size": 60, "top_k": 2, "exclude_own": True}
CLUSTERS = {"num_prototypes": [4], "warmup_epochs": 0}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "debiased": ("debiased", NO_BATCH_NORM),
    "queue": ("hard_negative", {**NO_BATCH_NORM, "negatives": "queue", "queue_size": 60}),
    "mochi": ("mochi", {"queue_size": 60, "exclude_own": True, "mixing": MIXES}),
    "near": ("nnclr_symmetric", {**NO_BATCH_NORM, "support_set": SUPPORT, "pred_hidden_dim": 16}),
    "triplet": ("metric", {"proj_batch_norm": False, "loss": "triplet_loss_func"}),
    "arcface": (
        "metric",
        {
            "proj_batch_norm": False,
            "loss": "arcface_loss_func",
            "classes": "cluster",
            "clusters": CLUSTERS,
        },
    ),
    "seed": ("seed", {"queue_size": 60}),
    "taught in the batch": (
        "seed",
        {
            "loss": "contrastive",
            "teacher_temperature": None,
            "negatives": "batch",
            "tau_plus": 0.1,
            "beta": 1.0,
        },
    ),
    "protoseed": ("protoseed", {"head": "mlp"}),
    "softmax": ("protoseed", {"head": "mlp", "assignment": "softmax", "prior_momentum": 0.5}),
    "protocpc": ("protocpc", {"proj_batch_norm": False, "freeze_prototypes_epochs": 0}),
}
"""Whole runs of two steps, without batch norm."""


def config_of(
    make_config: MakeConfig, make_distilled: MakeConfig, name: str, processes: int
) -> dict[str, Any]:
    method, kwargs = RUNS[name]
    make = make_distilled if method in ("seed", "protoseed") else make_config
    config = make(
        method,
        method_kwargs=kwargs,
        augmentations=FIXED_CROPS,
        optimizer={"batch_size": BATCH // processes, "lr": 0.5, "kwargs": {"momentum": 0.9}},
        devices=processes,
        checkpoint={"enabled": False},
    )
    kwargs = {**VIT, "dynamic_img_size": True}
    config["backbone"] = {"name": "timm/vit_tiny_patch16_224", "kwargs": kwargs}
    return config | ({"strategy": "ddp"} if processes > 1 else {})


def run(make_config: MakeConfig, make_distilled: MakeConfig, folder: Path, processes: int) -> Noted:
    """Trains all runs in one process or in two; what each rank noted."""
    configs = {name: config_of(make_config, make_distilled, name, processes) for name in RUNS}
    (folder / "configs.json").write_text(json.dumps(configs))
    run_script(HERE / "contrastive_run.py", folder)
    ranks = range(processes)
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in ranks] for name in RUNS}


@pytest.fixture(scope="module")
def one(
    make_config: MakeConfig, make_distilled: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> Noted:
    return run(make_config, make_distilled, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(
    make_config: MakeConfig, make_distilled: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> Noted:
    return run(make_config, make_distilled, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("name", script.FIXED)
def test_loss_of_two_ranks_is_that_of_one(one: Noted, two: Noted, name: str) -> None:
    """Given the features: in value and gradient, those of learned weights included."""
    first = next(iter(RUNS))
    alone, both = one[first][0][name], [noted[name] for noted in two[first]]
    assert alone["loss"].abs() > 1e-3
    for found in both:
        torch.testing.assert_close(found["loss"], alone["loss"])
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    for view, expected in enumerate(alone["gradients"]):
        joined = torch.cat([found["gradients"][view] for found in both])
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_run_of_two_ranks_is_that_of_one(one: Noted, two: Noted, name: str) -> None:
    """On the joined batch, given crops and draws: all weights after two steps."""
    (alone,), both = one[name], two[name]
    moved = 0.0
    for rank in both:
        assert rank["start"].keys() == rank["state"].keys() == alone["state"].keys()
        for key, start in alone["start"].items():
            tables = "queues", "support_set", "prototypes", "bank"
            if key.startswith(tables) and key != "prototypes.weight":
                continue
            torch.testing.assert_close(rank["start"][key], start, rtol=0, atol=0)
            end = alone["state"][key]
            torch.testing.assert_close(rank["state"][key], end, rtol=1e-4, atol=1e-5, msg=key)
            if end.numel():
                moved = max(moved, float((end.float() - start.float()).abs().max()))
    assert moved > 1e-2


def ring(start: Tensor, steps: list[Tensor]) -> Tensor:
    rows = torch.cat(steps)
    return torch.cat((rows, start[len(rows) :]))


def test_ranks_move_their_prototypes_and_prior(two: Noted) -> None:
    for name in ("protoseed", "softmax", "protocpc"):
        for rank in two[name]:
            for key in ("prototypes.weight", "prior.value"):
                # Sinkhorn leaves the prior near 1.
                assert (rank["state"][key] - rank["start"][key]).abs().max() > 1e-5, (name, key)
                assert torch.equal(rank["state"][key], two[name][0]["state"][key])


def test_both_ranks_hold_the_teacher_s_embeddings_of_both(two: Noted) -> None:
    steps = [[rank["written"][step] for rank in two["seed"]] for step in range(2)]
    for rank in two["seed"]:
        for place in range(2):
            key = f"queues.{place}.value"
            written = [keys[place] for ranks in steps for keys in ranks]
            start = two["seed"][0]["start"][key]
            assert torch.equal(rank["state"][key], ring(start, written))


@pytest.mark.parametrize("name", ["queue", "mochi", "near"])
def test_both_ranks_hold_the_keys_of_both(two: Noted, name: str) -> None:
    """Step by step, rank by rank, the same on each."""
    both = two[name]
    steps = [[rank["written"][step] for rank in both] for step in range(2)]
    tables: dict[str, Any] = {
        f"queues.{view}.value": [keys[view] for ranks in steps for keys, _, _ in ranks]
        for view in range(2)
    }
    if name == "near":
        tables = {
            "support_set.value": [keys[0] for ranks in steps for keys, _, _ in ranks],
            "support_set.indices": [indices for ranks in steps for _, indices, _ in ranks],
            "support_set.labels": [targets for ranks in steps for _, _, targets in ranks],
        }
    for rank in both:
        for key, written in tables.items():
            assert sum(len(part) for part in written) == 2 * BATCH
            assert torch.equal(rank["state"][key], ring(both[0]["start"][key], written)), key
        state = {k: v for k, v in rank["state"].items() if k.endswith("_extra_state")}
        assert all(torch.equal(v, both[0]["state"][k]) for k, v in state.items())
    written = next(iter(tables.values()))
    assert not torch.equal(written[0], written[1]), "the ranks had images of their own"
