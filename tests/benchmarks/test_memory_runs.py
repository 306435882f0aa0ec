"""The formulas of memory and traffic are those of real runs in two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.update_memory import Traffic, e_step, state, step
from tests.scripts import run_script

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., dict[str, Any]]
HERE = Path(__file__).parent
IMAGES, BATCH, RANKS, DIM = 48, 8, 2, 8
KMEANS = {"iterations": 2, "warm_iterations": 1}
"""Of one warm iteration none can be spared."""
CLUSTERS = {"num_prototypes": [5], "warmup_epochs": 0, "kmeans": KMEANS}
MARGIN = {"loss": "arcface_loss_func", "classes": "cluster"}
COUNTS = [3, 6]
EVERY_RUN = Traffic(all_reduce=32)
"""At the first step, and every five seconds, a signal, a lost worker, a checkpoint that is due and
the next time."""
S = {"n": IMAGES, "N": BATCH, "R": RANKS, "D": DIM, "V": 2, "U": 2, "M": 1, "d": 1, "k": 1, "i": 3}
BANK = {"e_step": "bank"}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "debiased": ("debiased", {}, {}),
    "hard_negative": ("hard_negative", {}, {}),
    "mochi": ("mochi", {}, {"Q": 48}),
    "nnclr_symmetric": ("nnclr_symmetric", {}, {"Q": 30}),
    "metric": ("metric", {**MARGIN, "clusters": CLUSTERS}, {"K": 5}),
    "metric, bank": ("metric", {**MARGIN, "clusters": {**CLUSTERS, **BANK}}, {"K": 5}),
    "pcl": ("pcl", {"kmeans": KMEANS}, {"Q": 48, "ΣK": 9, "M": 2}),
    "pcl, bank": (
        "pcl",
        {"kmeans": KMEANS, "symmetric": True, **BANK},
        {"Q": 48, "ΣK": 9, "M": 2, "d": 2},
    ),
    "protocpc": ("protocpc", {}, {"K": 20}),
    "seed": ("seed", {}, {"Q": 30}),
    "protoseed": ("protoseed", {}, {"K": 20}),
    "protoseed, softmax": ("protoseed", {"assignment": "softmax"}, {"K": 20, "i": 1}),
}
"""Method, settings, and sizes."""


@pytest.fixture(scope="module")
def measured(
    make_config: MakeConfig, make_distilled: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the first of two processes noted of each run; both note the same."""
    folder = tmp_path_factory.mktemp("traffic")
    configs = {}
    for name, (method, kwargs, _) in RUNS.items():
        make = make_distilled if method in ("seed", "protoseed") else make_config
        configs[name] = make(
            method,
            method_kwargs=kwargs,
            optimizer={"batch_size": BATCH},
            devices=RANKS,
            strategy="ddp",
            max_epochs=2 if "bank" in name else 1,
            checkpoint={"frequency": 100},
            log_every_n_steps=2,
        )
    (folder / "configs.json").write_text(json.dumps(configs))
    run_script(HERE / "traffic_run.py", folder, timeout=550)
    found = {n: [torch.load(folder / f"{n}-{r}.pt") for r in range(RANKS)] for n in RUNS}
    for first, second in found.values():
        assert first == second
    return {name: ranks[0] for name, ranks in found.items()}


@pytest.mark.parametrize("name", RUNS)
def test_state(measured: dict[str, dict[str, Any]], name: str) -> None:
    method, _, sizes = RUNS[name]
    assert measured[name].get("state", 0) == state(method, {**S, **sizes}, "bank" in name)


@pytest.mark.parametrize("name", RUNS)
def test_step(measured: dict[str, dict[str, Any]], name: str) -> None:
    """All that it gives to collectives: no state buffer is among what DDP broadcasts."""
    found, (method, _, sizes) = measured[name], RUNS[name]
    own = step(method, {**S, **sizes}, "bank" in name)
    # Gradients, and the statistics of batch norm before a forward pass.
    of_ddp = Traffic(all_reduce=4 * found["parameters"], broadcast=found["batch_norm"])
    assert Traffic(**found["step"]) == own + of_ddp + EVERY_RUN


@pytest.mark.parametrize(
    ("name", "counts"),
    [("metric", [5]), ("metric, bank", [5]), ("pcl", COUNTS), ("pcl, bank", COUNTS)],
)
def test_e_step(measured: dict[str, dict[str, Any]], name: str, counts: list[int]) -> None:
    """Cold, and warm with relocation."""
    found = measured[name]
    momentum = "pcl" in name
    embedder = found["momentum_batch_norm"] if momentum else found["batch_norm"]
    cold, *warm = found["e_steps"]
    bank = "bank" in name
    assert Traffic(**cold) == e_step(S, counts, 2, embedder=embedder, bank=bank)
    assert len(warm) == bank
    for one in warm:
        # The bank has met every image by then.
        options = {"warm": True, "embeds": False, "bank": True, "matched": "metric" in name}
        assert Traffic(**one) == e_step(S, counts, 1, embedder=embedder, **options)
