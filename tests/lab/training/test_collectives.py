"""What processes exchange in a step: gradients, and what the method's mathematics needs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from solo_ext import host
from tests.conftest import MakeConfig, json_lines
from tests.matrix.rows import methods
from tests.matrix.two_steps import config_maker, two_steps
from tests.scripts import run_script

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
RANKS, BATCH, LOGGED = 2, 4, 3
"""Processes, images of each and step, and every how many steps Lightning logs."""
EXPECTED: dict[str, tuple[int, int, str]] = {
    "debiased": (1, 1, "embeddings of all views are candidates; their gradients are summed"),
    "hard_negative": (1, 1, "likewise"),
    "mochi": (0, 1, "keys for the queues, of both views at once"),
    "metric": (1, 1, "indices, and their images' clusters, which are its classes"),
    "pcl": (1, 2, "indices, and their images' clusters; keys for the queues"),
    "nnclr_symmetric": (
        1,
        4,
        "predictions and the sum of their gradients; neighbours; keys for the support set, and "
        "their indices with their labels",
    ),
    "seed": (0, 1, "the teacher's embeddings for the queue"),
    "protocpc": (8, 0, "of each target view three Sinkhorn iterations and the prior"),
    "protoseed": (8, 0, "likewise"),
}
"""Of a method all-reduces and all-gathers in a step, and why."""
_NEIGHBOURS = "keys for the queue, and their labels"
_SINKHORN = "Sinkhorn of each view: the sum, and three iterations"
_VIEWS = "both views, and the sums of their gradients"
BUILTIN: dict[str, dict[str, tuple[int, int, str]]] = {
    "1.0.2": {
        "barlow_twins": (1, 0, "the cross-correlation of all processes"),
        "dino": (1, 0, "the mean of the teacher's outputs, for the centre"),
        "mocov2plus": (0, 2, "keys for the queues, one by one"),
        "nnbyol": (0, 2, _NEIGHBOURS),
        "nnclr": (0, 2, _NEIGHBOURS),
        "nnsiam": (0, 2, _NEIGHBOURS),
        "ressl": (0, 1, "keys for the queue"),
        "swav": (8, 0, _SINKHORN),
    },
    "main": {
        "all4one": (
            4,
            7,
            "predictions of four terms, and the sums of their gradients; keys, labels and indices",
        ),
        "barlow_twins": (1, 0, "the cross-correlation of all processes"),
        "dino": (1, 0, "the mean of the teacher's outputs, for the centre"),
        "mae": (4, 0, "the gradients of its larger network, in five buckets"),
        "mocov2plus": (0, 2, "keys for the queues, one by one"),
        "mocov3": (0, 2, "keys of both views"),
        "nnbyol": (0, 2, _NEIGHBOURS),
        "nnclr": (2, 4, f"predictions and the sums of their gradients; {_NEIGHBOURS}"),
        "nnsiam": (0, 2, _NEIGHBOURS),
        "ressl": (0, 1, "keys for the queue"),
        "simclr": (1, 2, "embeddings, the sum of their gradients, and indices"),
        "supcon": (1, 2, "embeddings, the sum of their gradients, and labels"),
        "swav": (8, 0, _SINKHORN),
        "vibcreg": (2, 2, _VIEWS),
        "vicreg": (2, 2, _VIEWS),
    },
}
"""Those of solo-learn's own methods that exchange anything."""
Steps = list[dict[str, int]]


@pytest.fixture(scope="module")
def ran(
    make_config: MakeConfig, make_distilled: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of one run per method, with what its first process noted."""
    folder = tmp_path_factory.mktemp("collectives")
    make = config_maker(make_config, make_distilled)
    configs = {}
    for method in methods():
        config = two_steps(make, method, RANKS, BATCH, log_every_n_steps=LOGGED)
        configs[method] = config | {"checkpoint": {"frequency": 100}}
    (folder / "configs.json").write_text(json.dumps(configs))
    run_script(TESTS / "benchmarks" / "traffic_run.py", folder, timeout=900)
    return folder


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("method", methods())
def test_step(ran: Path, method: str) -> None:
    """DDP sums the gradients and sends the statistics of batch norm; the rest is in the tables."""
    steps: Steps = torch.load(ran / f"{method}-0.pt")["calls"]
    # Some steps log; one rebuilds DDP's buckets; every five seconds one looks for signals.
    (step,) = (dict(calls) for calls, _ in Counter(tuple(s.items()) for s in steps).most_common(1))
    sums, gathers, _ = {**EXPECTED, **BUILTIN[host.load().info.generation]}.get(method, (0, 0, ""))
    assert step.pop("broadcast", 0) <= 2
    assert step.pop("allreduce") == 1 + sums
    assert step.pop("allgather", 0) == gathers
    assert not step


@pytest.mark.parametrize("method", methods())
def test_what_is_logged_is_the_mean_over_processes(ran: Path, method: str) -> None:
    lines = json_lines(ran / method / "metrics.jsonl")
    first = [line["number_step"] for line in lines if "number_step" in line and line["epoch"] == 0]
    assert first == [0.5 + 10 * (LOGGED - 1), 0.5 + 10 * (2 * LOGGED - 1)]
    of_epochs = [line["number_epoch"] for line in lines if "number_epoch" in line]
    assert of_epochs[0] == 0.5 + 10 * (2 * LOGGED - 1) / 2
