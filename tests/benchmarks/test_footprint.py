"""The formulas of the footprint are those of real runs in two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.footprint import formulas
from benchmarks.footprint.formulas import Footprint, Sizes, Traffic
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
S = Sizes(IMAGES, BATCH, RANKS, DIM)
RUNS: dict[str, tuple[str, dict[str, Any], Footprint]] = {
    "debiased": ("debiased", {}, formulas.in_batch(S)),
    "hard_negative": ("hard_negative", {}, formulas.in_batch(S)),
    "mochi": ("mochi", {}, formulas.mochi(S, 48, 8)),
    "nnclr_symmetric": ("nnclr_symmetric", {}, formulas.nearest_neighbours(S, 30)),
    "metric": ("metric", {**MARGIN, "clusters": CLUSTERS}, formulas.metric(S, [5])),
    "metric, bank": (
        "metric",
        {**MARGIN, "clusters": {**CLUSTERS, "e_step": "bank"}},
        formulas.metric(S, [5], bank=True),
    ),
    "pcl": ("pcl", {"kmeans": KMEANS}, formulas.pcl(S, 48, COUNTS)),
    "pcl, bank": (
        "pcl",
        {"kmeans": KMEANS, "e_step": "bank", "symmetric": True},
        formulas.pcl(S, 48, COUNTS, directions=2, bank=True),
    ),
    "protocpc": ("protocpc", {}, formulas.assignments(S, 20, targets=2)),
    "seed": ("seed", {}, formulas.seed(S, 30)),
    "protoseed": ("protoseed", {}, formulas.assignments(S, 20, targets=1)),
    "protoseed, softmax": (
        "protoseed",
        {"assignment": "softmax"},
        formulas.assignments(S, 20, targets=1, iterations=0),
    ),
}


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
    assert measured[name].get("state", 0) == RUNS[name][2].state


@pytest.mark.parametrize("name", RUNS)
def test_step(measured: dict[str, dict[str, Any]], name: str) -> None:
    """All that it gives to collectives: no state buffer is among what DDP broadcasts."""
    found = measured[name]
    expected = formulas.ddp(found["parameters"], found["batch_norm"]) + RUNS[name][2].step
    assert Traffic(**found["step"]) == expected + EVERY_RUN


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
    assert Traffic(**cold) == formulas.e_step(S, counts, 2, embedder=embedder, bank=bank)
    assert len(warm) == bank
    for one in warm:
        # The bank has met every image by then.
        options = {"warm": True, "embeds": False, "bank": True, "matched": "metric" in name}
        expected = formulas.e_step(S, counts, 1, embedder=embedder, **options)
        assert Traffic(**one) == expected
