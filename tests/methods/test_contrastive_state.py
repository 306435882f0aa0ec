"""What contrastive methods keep between steps: queues, support set, bank, prototypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.config.check import common_config
from solo_ext.data.transforms import eval_transform, fixed_view
from solo_ext.data.views import FixedViews

Train = Callable[..., dict[str, float]]
QUEUE, SUPPORT, BATCH = 60, 50, 20
CROPS = [{"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 1}]
FROM_QUEUE = {"negatives": "queue", "queue_size": QUEUE}
NEGATIVES: dict[str, dict[str, Any]] = {"batch": {}, "queue": FROM_QUEUE}
NEAR = {"positives": "nearest_neighbor", "support_set": {"size": SUPPORT}}
CLUSTERED: dict[str, Any] = {
    "positives": "prototype",
    "clusters": {"num_prototypes": [3, 6], "warmup_epochs": 0},
}


def tables(method: Any) -> dict[str, Tensor]:
    """All that is written between steps."""
    names = ("queues", "support_set", "bank")
    state = {k: v for k, v in method.state_dict().items() if k.startswith(names)}
    return {k: v.clone() for k, v in state.items()}


class Steps(Callback):
    """Notes the state before a step, what it will write, and the state at the end."""

    def __init__(self) -> None:
        self.written: list[tuple[list[Tensor], Tensor, Tensor]] = []
        self.method: Any = None

    def on_train_batch_start(self, trainer: Any, method: Any, *_: Any) -> None:
        self.before = tables(method)

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        # Before the method's own hook: what the step looked up is what it began with.
        for name, table in tables(method).items():
            assert torch.equal(table, self.before[name]), name
        keys, indices, targets = method._written
        assert torch.equal(indices, batch[0])
        assert torch.equal(targets, batch[2])
        assert not any(key.requires_grad for key in keys)
        self.written.append(([k.clone() for k in keys], indices.clone(), targets.clone()))

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.method = method

    def column(self, view: int) -> Tensor:
        return torch.cat([keys[view] for keys, _, _ in self.written])


def ring(written: Tensor, size: int) -> Tensor:
    """Rows written one after the other, around a table."""
    table = written.new_zeros((size, *written.shape[1:]))
    for place, row in enumerate(written):
        table[place % size] = row
    return table


@pytest.mark.parametrize("crops", [CROPS[:1], CROPS], ids=["", "small crops"])
def test_queues_and_support_set_take_the_step_s_keys(train: Train, crops: Any) -> None:
    """After the step, in order: each queue its own large crop, the support set the first."""
    steps = Steps()
    changes = {"augmentations": crops, "optimizer": {"batch_size": BATCH}, "max_epochs": 2}
    kwargs = {**FROM_QUEUE, **NEAR, "exclude_own": len(crops) > 1}
    train("hard_negative", steps, method_kwargs=kwargs, **changes)
    assert len(steps.written) == 4
    assert len(steps.method.queues) == 2
    for view, queue in enumerate(steps.method.queues):
        assert torch.equal(queue.value, ring(steps.column(view), QUEUE))
        assert queue.pointer == 80 - QUEUE
    support = steps.method.support_set
    assert torch.equal(support.value, ring(steps.column(0), SUPPORT))
    _, indices, targets = zip(*steps.written, strict=True)
    for queue in steps.method.queues if kwargs["exclude_own"] else ():
        assert torch.equal(queue.indices, ring(torch.cat(indices), QUEUE))
    assert torch.equal(support.indices, ring(torch.cat(indices), SUPPORT))
    assert torch.equal(support.labels, ring(torch.cat(targets), SUPPORT))
    norms = steps.column(0).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


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


def test_bank_takes_the_mean_of_the_keys(train: Train) -> None:
    steps = Steps()
    kwargs = {**CLUSTERED, "clusters": {**CLUSTERED["clusters"], "e_step": "bank"}}
    train("hard_negative", steps, method_kwargs=kwargs)
    bank = steps.method.bank
    assert bank.filled.all()
    for keys, indices, _ in steps.written:
        expected = F.normalize(torch.stack(keys).mean(0), dim=1)
        torch.testing.assert_close(bank.value[indices], expected)


class Clusters(Callback):
    """Notes prototypes at the first batch of each epoch, and the features by hand."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
        if method.predictor is not None:
            self.statistics = method.predictor[1].running_mean.clone()

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        state = method.prototypes
        self.epochs.append(state.epoch)
        if method.predictor is not None:
            assert torch.equal(method.predictor[1].running_mean, self.statistics)
        if state.epoch != trainer.current_epoch:
            return
        momentum = method.cfg.method_kwargs.negatives == "queue"
        names = [("momentum_" if momentum else "") + n for n in ("backbone", "projector")]
        networks = [getattr(method, name) for name in names]
        side, statistics = fixed_view(common_config(method.cfg))
        transform = eval_transform(side, *statistics)
        views = FixedViews(trainer.train_dataloader.dataset.images, transform)
        for network in networks:
            network.eval()
        rows = [networks[1](networks[0](views[i][0].unsqueeze(0))) for i in range(len(views))]
        for network in networks:
            network.train()
        features = F.normalize(torch.cat(rows), dim=1)
        for means, ids in zip(state.means, state.assignments, strict=True):
            distances = torch.cdist(features, means)
            chosen = distances.gather(1, ids.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(chosen, distances.amin(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_e_step_clusters_the_networks_of_the_keys(train: Train, negatives: str) -> None:
    """Those of the momentum encoder, where there is one; after its warm-up epochs."""
    clusters = Clusters()
    # A predictor, which takes no part.
    kwargs = {**CLUSTERED, **NEGATIVES[negatives], "pred_hidden_dim": 16}
    # Without a queue it would have no side until there are prototypes.
    warmup = int(negatives == "queue")
    kwargs["clusters"] = {**CLUSTERED["clusters"], "warmup_epochs": warmup, "e_step_every": 2}
    train("hard_negative", clusters, method_kwargs=kwargs, max_epochs=4)
    assert clusters.epochs == ([-1, 1, 1, 3] if warmup else [0, 0, 2, 2])


def test_prototypes_take_the_place_of_views_after_the_warm_up(build: Any, features: Any) -> None:
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


def test_all_state_is_kept_out_of_ddp_s_broadcast(build: Any) -> None:
    bank = {**CLUSTERED["clusters"], "e_step": "bank"}
    for kwargs in ({**FROM_QUEUE, **NEAR}, {**FROM_QUEUE, **CLUSTERED, "clusters": bank}):
        method = build(**kwargs)
        state = ("queues.", "support_set.", "prototypes.", "bank.")
        buffers = {name for name, _ in method.named_buffers() if name.startswith(state)}
        assert set(method._ddp_params_and_buffers_to_ignore) == buffers
        assert len(buffers) > 3
