"""Two processes agree with one: losses of given features, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import MakeConfig
from tests.matrix.compare import Held, apart, assert_trained_alike, in_one_order, weights_apart
from tests.matrix.two_steps import BATCH, FIXED_CROPS, QUEUE, config_maker, run_together, two_steps
from tests.methods import contrastive_ranks

pytestmark = pytest.mark.slow

Losses = dict[str, dict[str, Any]]
CROPS = [*FIXED_CROPS, {"rrc": {"enabled": False}, "crop_size": 8, "num_crops": 1}]
TAUGHT = {"loss": "contrastive", "teacher_temperature": None, "negatives": "batch"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "debiased": ("debiased", {}),
    "queue": ("hard_negative", {"negatives": "queue", "queue_size": QUEUE}),
    "mochi": ("mochi", {"exclude_own": True}),
    "near": ("nnclr_symmetric", {"support_set": {"top_k": 2, "exclude_own": True}}),
    "triplet": ("metric", {"loss": "triplet_loss_func", "classes": "instance"}),
    "arcface": ("metric", {"loss": "arcface_loss_func", "classes": "cluster"}),
    "seed": ("seed", {}),
    "taught in the batch": ("seed", {**TAUGHT, "tau_plus": 0.1, "beta": 1.0}),
    "protoseed": ("protoseed", {"head": "mlp"}),
    "softmax": ("protoseed", {"head": "mlp", "assignment": "softmax", "prior_momentum": 0.5}),
    "protocpc": ("protocpc", {}),
}
"""Two steps each, without batch norm."""


@pytest.fixture(scope="module")
def losses(in_processes: Callable[..., list[Losses]]) -> tuple[Losses, list[Losses]]:
    """Of one process, and of each of two."""
    with pytest.MonkeyPatch.context() as patch:
        contrastive_ranks.fix_draws(patch.setattr)
        return contrastive_ranks.losses(), in_processes(contrastive_ranks)


@pytest.fixture(scope="module")
def runs(
    make_config: MakeConfig, make_distilled: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, list[Held]]]:
    """``runs[processes][name]``: what each process held."""
    make = config_maker(make_config, make_distilled)

    def of(processes: int) -> dict[str, list[Held]]:
        configs = {
            name: two_steps(
                make,
                method,
                processes,
                BATCH // processes,
                method_kwargs=kwargs,
                augmentations=CROPS,
            )
            for name, (method, kwargs) in RUNS.items()
        }
        return run_together(tmp_path_factory.mktemp("runs"), configs, processes)

    return {processes: of(processes) for processes in (1, 2)}


@pytest.mark.parametrize("name", contrastive_ranks.FIXED)
def test_loss_of_two_ranks_is_that_of_one(losses: tuple[Losses, list[Losses]], name: str) -> None:
    """Given the features: in value and gradient, those of learned weights included."""
    alone, both = losses[0][name], [found[name] for found in losses[1]]
    assert alone["loss"].abs() > 1e-3
    for found in both:
        torch.testing.assert_close(found["loss"], alone["loss"])
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    for view, expected in enumerate(alone["gradients"]):
        joined = torch.cat([found["gradients"][view] for found in both])
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_run_of_two_ranks_is_that_of_one(runs: dict[int, dict[str, list[Held]]], name: str) -> None:
    """On the joined batch, given crops and draws: weights, queues, prototypes, prior."""
    (alone,), ranks = runs[1][name], runs[2][name]
    assert_trained_alike(alone, ranks)
    joined = in_one_order(ranks)
    assert not apart(joined, alone)
    assert not weights_apart(joined, alone, 1 / 1000)
