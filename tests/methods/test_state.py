"""What methods keep between steps: queues, support set, bank, prototypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.methods.steps import features, ring

Train = Callable[..., dict[str, float]]
QUEUE, SUPPORT, BATCH = 60, 50, 24
TWO = [{"crop_size": 16, "num_crops": 2}]
WITH_SMALL = [*TWO, {"crop_size": 8, "num_crops": 1}]
FROM_QUEUE = {"negatives": "queue", "queue_size": QUEUE}
NEGATIVES: dict[str, dict[str, Any]] = {"batch": {}, "queue": FROM_QUEUE}
NEAR = {"positives": "nearest_neighbor", "support_set": {"size": SUPPORT}}
CLUSTERED: dict[str, Any] = {
    "positives": "prototype",
    "clusters": {"num_prototypes": [3, 6], "warmup_epochs": 0},
}
BANK: dict[str, Any] = {**CLUSTERED, "clusters": {**CLUSTERED["clusters"], "e_step": "bank"}}
PCL = {"queue_size": QUEUE, "e_step": "bank", "symmetric": True}


def tables(method: Any) -> dict[str, Tensor]:
    """All that is written between steps."""
    names = ("queues", "support_set", "bank")
    state = {k: v for k, v in method.state_dict().items() if k.startswith(names)}
    return {k: v.clone() for k, v in state.items()}


class Steps(Callback):
    """Notes what every step will write, and the method at the end."""

    def __init__(self) -> None:
        self.keys: list[list[Tensor]] = []
        self.indices: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.method: Any = None

    def on_train_batch_start(self, trainer: Any, method: Any, *_: Any) -> None:
        self.before = tables(method)

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        # Before the method's own hook: what the step looked up is what it began with.
        for name, table in tables(method).items():
            assert torch.equal(table, self.before[name]), name
        (keys,) = (part for part in method._step_keys if isinstance(part, list))
        # PCL has no use for labels.
        others = [part for part in method._step_keys if isinstance(part, Tensor)]
        for found, given in zip(others, (batch[0], batch[2]), strict=False):
            assert torch.equal(found, given)
        assert not any(key.requires_grad for key in keys)
        self.keys.append([key.clone() for key in keys])
        self.indices.append(batch[0].clone())
        self.targets.append(batch[2].clone())

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.method = method

    def column(self, view: int) -> Tensor:
        return torch.cat([keys[view] for keys in self.keys])


RUNS: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "queues and support set": ("hard_negative", {**FROM_QUEUE, **NEAR}, TWO),
    "small crops": ("hard_negative", {**FROM_QUEUE, **NEAR, "exclude_own": True}, WITH_SMALL),
    "bank": ("hard_negative", BANK, TWO),
    "pcl": ("pcl", {**PCL, "warmup_epochs": 9}, TWO),
}


@pytest.mark.parametrize("case", RUNS)
def test_tables_take_the_step_s_keys(train: Train, case: str) -> None:
    """After the step: queues and support set in order, the bank the mean of views by index."""
    (name, kwargs, crops), steps = RUNS[case], Steps()
    train(name, steps, method_kwargs=kwargs, augmentations=crops, max_epochs=2)
    method, indices = steps.method, torch.cat(steps.indices)
    assert len(indices) == 4 * BATCH
    norms = steps.column(0).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    assert len(method.queues) == (2 if "queue_size" in kwargs else 0)
    for view, queue in enumerate(method.queues):
        assert torch.equal(queue.value, ring(steps.column(view), QUEUE))
        assert queue.pointer == 4 * BATCH - QUEUE
        if kwargs.keys() & {"exclude_own", "support_set"}:
            assert torch.equal(queue.indices, ring(indices, QUEUE))
    support = getattr(method, "support_set", None)
    assert (support is not None) == ("support_set" in kwargs)
    if support is not None:
        assert torch.equal(support.value, ring(steps.column(0), SUPPORT))
        assert torch.equal(support.indices, ring(indices, SUPPORT))
        assert torch.equal(support.labels, ring(torch.cat(steps.targets), SUPPORT))
    assert (method.bank is not None) == (case in ("bank", "pcl"))
    if method.bank is not None:
        assert method.bank.filled.all()
        mean = F.normalize(torch.stack([steps.column(0), steps.column(1)]).mean(0), dim=1)
        # The second epoch meets every image again.
        last = slice(2 * BATCH, None)
        torch.testing.assert_close(method.bank.value[indices[last]], mean[last])


def test_beta_falls_while_training(train: Train) -> None:
    betas: list[float] = []

    class Betas(Callback):
        def on_train_batch_end(self, trainer: Any, method: Any, *_: Any) -> None:
            betas.append(method.estimator.beta)

    kwargs = {"beta": 0.8, "anneal_beta": True}
    train(
        "hard_negative", Betas(), method_kwargs=kwargs, optimizer={"batch_size": 48}, max_epochs=4
    )
    assert betas == pytest.approx([0.8, 0.8, 0.7, 0.6])


def test_prototypes_take_the_place_of_views_after_the_warm_up(build: Any) -> None:
    queries, indices = features(2), torch.arange(4)
    keys = [F.normalize(z.detach(), dim=1) for z in queries]
    for shared in NEGATIVES.values():
        clustered = build(positives="prototype", clusters={"num_prototypes": [3]}, **shared)
        views = build(**shared)
        views.queues = clustered.queues
        expected, _ = views.contrast(queries, keys, indices, indices)
        assert not torch.equal(clustered.contrast(queries, keys, indices, indices)[0], expected)
        clustered.prototypes.epoch = -1
        assert torch.equal(clustered.contrast(queries, keys, indices, indices)[0], expected)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {**NEAR, "pred_hidden_dim": 16}, CLUSTERED],
    ids=["view", "near", "prototype"],
)
def test_momentum_networks_are_there_for_queues_alone(build: Any, kwargs: dict[str, Any]) -> None:
    for negatives, chosen in NEGATIVES.items():
        method = build(**chosen, **kwargs)
        names = {name.partition(".")[0] for name in method.state_dict()}
        momentum = {"momentum_backbone", "momentum_projector"} if negatives == "queue" else set()
        assert {n for n in names if n.startswith("momentum")} == momentum
        assert ("queues" in names) == (negatives == "queue")
        learnt = [id(p) for group in method.learnable_params for p in group["params"]]
        online = [id(p) for n, p in method.named_parameters() if not n.startswith("momentum")]
        assert sorted(learnt) == sorted(online)
        assert all(
            not p.requires_grad for n, p in method.named_parameters() if n.startswith("momentum")
        )


@pytest.mark.parametrize(
    ("name", "kwargs", "state"),
    [
        ("hard_negative", {**FROM_QUEUE, **NEAR}, ("queues.", "support_set.", "prototypes.")),
        ("hard_negative", {**FROM_QUEUE, **BANK}, ("queues.", "prototypes.", "bank.")),
        ("pcl", PCL, ("queues.", "prototypes.", "bank.")),
        ("seed", {}, ("queues.", "teacher.")),
        # Their prototypes learn.
        ("protoseed", {}, ("prior.", "teacher.")),
    ],
    ids=str,
)
def test_ddp_broadcasts_neither_state_nor_teacher(
    make_method: Any, name: str, kwargs: dict[str, Any], state: tuple[str, ...]
) -> None:
    method = make_method(name, **kwargs)
    held = {name for name, _ in (*method.named_parameters(), *method.named_buffers())}
    kept_out = {name for name in held if name.startswith(state)}
    assert set(method._ddp_params_and_buffers_to_ignore) == kept_out
    assert {name.partition(".")[0] + "." for name in kept_out} == {*state}
