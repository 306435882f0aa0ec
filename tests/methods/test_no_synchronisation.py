"""No value is asked for in a step: the losses run on meta tensors, where that would raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS, PCL, Metric
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
LARGE, SMALL = {"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to make a tensor anywhere else: a copy between devices waits for both."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            assert not isinstance(tensor, Tensor) or tensor.device == META, func
        return out


def numbers() -> Tensor:
    """Indices or labels of a batch."""
    return torch.empty(6, dtype=torch.long, device=META)


def assert_runs(crops: int, step: Callable[[list[Tensor]], Any]) -> None:
    """Loss, gradients and metrics of a step."""
    z = [torch.empty(6, 8, device=META, requires_grad=True) for _ in range(crops)]
    with OnMeta():
        loss, metrics = step(z)
        loss.backward()
    assert loss.device == META
    assert all(value.device == META for value in metrics.values())
    assert all(x.grad is not None for x in z)


def assert_contrasts(method: Any, crops: int) -> None:
    """Loss, gradients and writes of a step."""
    method.to(META)
    indices, targets = numbers(), numbers()
    key = torch.empty(6, 8, device=META)
    assert_runs(crops, lambda z: method.contrast(z, [key, key], indices, targets))
    with OnMeta():
        for queue in method.queues:
            queue.update_(key, *([indices, targets] if method.kwargs.exclude_own else []))
        if method.support_set is not None:
            method.support_set.update_(key, indices, targets)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(build: Build, name: str) -> None:
    assert_contrasts(build(METHODS[name].target, **PRESETS[name]), 2)


@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_combinations(build: Build, case: tuple[str, str, bool]) -> None:
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
    assert_contrasts(method, 3)


@pytest.mark.parametrize(
    "kwargs", [{}, {"num_negatives": 4, "num_prototypes": [40, 48], "symmetric": True}], ids=str
)
def test_pcl(build: Build, kwargs: dict[str, Any]) -> None:
    sizes = {"num_prototypes": [3, 6], "queue_size": 48, "e_step": "bank"}
    method = build(PCL, **{**sizes, **kwargs}).to(META)
    indices, key = numbers(), torch.empty(6, 8, device=META)
    crops = len(method.queues)
    assert_runs(crops, lambda z: method.contrast(z, [key] * crops, indices))
    method.bank.resize_(48)
    with OnMeta():
        method.bank.update_(indices, key)
        method.queues[0].update_(key)


@pytest.mark.parametrize(
    ("loss", "kwargs"),
    [
        *(("triplet_loss_func", {"mining": m}) for m in ("semi_hard", "hard", "random")),
        *(
            (n, {"classes": c, "uniformity_weight": 0.1})
            for n in OWN
            for c in criterion_of(n).classes
        ),
    ],
    ids=str,
)
def test_metric_losses(build: Build, loss: str, kwargs: dict[str, Any]) -> None:
    clusters = {"num_prototypes": [3], "warmup_epochs": 0}
    method = build(Metric, loss=loss, clusters=clusters, **kwargs).to(META)
    indices, targets = numbers(), numbers()
    assert_runs(3, lambda z: method.compare(z, indices, targets))


CONTRASTIVE = {"loss": "contrastive", "teacher_temperature": None}


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("seed", {}),
        ("seed", {**CONTRASTIVE, "tau_plus": 0.1}),
        ("seed", {**CONTRASTIVE, "negatives": "batch", "mixing": MIXES}),
        ("seed", {"loss": "regression", "teacher_temperature": None}),
        *(
            (name, kwargs)
            for name in ("protoseed", "protocpc")
            for kwargs in (
                {},
                {"assignment": "softmax", "loss": "ce"},
                {"compute_dtype": "bfloat16"},
            )
        ),
    ],
    ids=str,
)
def test_targets_of_a_teacher(make_method: Any, name: str, kwargs: dict[str, Any]) -> None:
    crops = [{**LARGE, "num_crops": 1}, SMALL] if name == "seed" else [LARGE, SMALL]
    method = make_method(name, crops, **kwargs).to(META)
    step = method.compare if name == "protocpc" else method.distill
    teachers = [torch.empty(6, 8, device=META) for _ in range(3 if name == "seed" else 2)]
    assert_runs(sum(crop["num_crops"] for crop in crops), lambda z: step(z, teachers))
