"""No value is asked for in a step: the losses run on meta tensors, where that would raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS, Metric
from solo_ext.methods.metric_criteria import criterion_of, metric_losses

Build = Callable[..., Any]
META = torch.device("meta")
POSITIVES, NEGATIVES = ("view", "nearest_neighbor", "prototype"), ("batch", "queue")
MIXES = {"num_hard": 3, "num_pair_mixes": 4, "num_query_mixes": 2, "warmup_epochs": 0}
PRESETS = {
    "debiased": {},
    "hard_negative": {},
    "mochi": {"queue_size": 40, "exclude_own": True, "mixing": MIXES},
    "nnclr_symmetric": {"support_set": {"size": 40, "exclude_own": True}, "pred_hidden_dim": 16},
}
COMBINED = list(itertools.product(POSITIVES, NEGATIVES, (False, True)))


OWN = [n for n in metric_losses() if LOSSES[n].origin == "solo_ext"]


def embeddings(count: int) -> list[Tensor]:
    return [torch.empty(6, 8, device=META, requires_grad=True) for _ in range(count)]


def contrast(method: Any, on_meta: Any, crops: int) -> None:
    """Loss, gradient and writes of a step."""
    method.to(META)
    queries = embeddings(crops)
    keys = [z.detach() for z in queries[:2]]
    indices, targets = (torch.empty(6, dtype=torch.long, device=META) for _ in range(2))
    with on_meta:
        loss, metrics = method.contrast(queries, keys, indices, targets)
        loss.backward()
        for queue in method.queues:
            queue.update_(keys[0], *([indices, targets] if method.kwargs.exclude_own else []))
        if method.support_set is not None:
            method.support_set.update_(keys[0], indices, targets)
    assert loss.device == META
    assert all(value.device == META for value in metrics.values())
    assert all(z.grad is not None for z in queries)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(build: Build, on_meta: Any, name: str) -> None:
    contrast(build(METHODS[name].target, **PRESETS[name]), on_meta, 2)


@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_combinations(build: Build, on_meta: Any, case: tuple[str, str, bool]) -> None:
    positives, negatives, mixing = case
    method = build(
        small=1,
        positives=positives,
        negatives=negatives,
        queue_size=40 if negatives == "queue" else None,
        temperature=0.5,
        tau_plus=0.1,
        beta=0.5,
        mixing=MIXES if mixing else {},
        exclude_own=negatives == "queue",
        support_set={"size": 40, "top_k": 2, "exclude_own": True},
        clusters={"num_prototypes": [3, 4]},
    )
    contrast(method, on_meta, 3)


@pytest.mark.parametrize("mining", ["semi_hard", "hard", "random"])
def test_mining(build: Build, on_meta: Any, mining: str) -> None:
    compare(build(Metric, loss="triplet_loss_func", mining=mining), on_meta)


@pytest.mark.parametrize(
    ("name", "classes"), [(n, c) for n in OWN for c in criterion_of(n).classes]
)
def test_metric_losses(build: Build, on_meta: Any, name: str, classes: str) -> None:
    clusters = {"num_prototypes": [3], "warmup_epochs": 0}
    method = build(Metric, loss=name, classes=classes, clusters=clusters, uniformity_weight=0.1)
    compare(method, on_meta)


def compare(method: Any, on_meta: Any) -> None:
    method.to(META)
    views = embeddings(3)
    indices, targets = (torch.empty(6, dtype=torch.long, device=META) for _ in range(2))
    with on_meta:
        loss, metrics = method.compare(views, indices, targets)
        loss.backward()
    assert loss.device == META
    assert all(value.device == META for value in metrics.values())
    assert all(z.grad is not None for z in views)
