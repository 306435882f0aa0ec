"""Margin losses whose classes are clusters: weights follow the clusters from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.memory.heads import ClassWeights
from solo_ext.methods.e_step import EStep

Train = Callable[..., dict[str, float]]
ARCFACE: dict[str, Any] = {
    "loss": "arcface_loss_func",
    "classes": "cluster",
    "clusters": {"num_prototypes": [4], "warmup_epochs": 0},
}


class Follow(Callback):
    """Notes class weights, their optimiser's state and the clusters around every E-step."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def note(self, trainer: Any, method: Any) -> dict[str, Tensor]:
        weight = method.criterion.class_weights.weight
        state = trainer.optimizers[0].state.get(weight, {})
        return {
            "weight": weight.detach().clone(),
            "assignments": method.prototypes.assignments[0].clone(),
            **{k: v.clone() for k, v in state.items() if isinstance(v, Tensor)},
        }

    def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
        self.before.append(self.note(trainer, method))

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.after.append(self.note(trainer, method))


def renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-steps whose clusters come in another order each time."""
    run = EStep.run

    def shuffle(e_step: EStep, method: Any) -> Any:
        metrics = run(e_step, method)
        state = method.prototypes
        state.assignments = (state.assignments + method.current_epoch) % 4
        return metrics

    monkeypatch.setattr(EStep, "run", shuffle)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("sgd", {"momentum_buffer"}), ("adam", {"exp_avg", "exp_avg_sq"})],
)
def test_weights_follow_the_clusters(
    train: Train, monkeypatch: pytest.MonkeyPatch, optimizer: str, moments: set[str]
) -> None:
    renumbered(monkeypatch)
    follow = Follow()
    train(
        "metric",
        follow,
        method_kwargs=ARCFACE,
        max_epochs=3,
        optimizer={"name": optimizer, "lr": 0.05},
    )
    for epoch, (before, after) in enumerate(zip(follow.before, follow.after, strict=True)):
        if epoch == 0:
            assert torch.equal(before["weight"], after["weight"])
            continue
        assert moments <= set(before)
        match = ClassWeights(4, 1).rematch_(before["assignments"], after["assignments"])
        for name in ("weight", *moments):
            assert torch.equal(after[name], before[name][match]), name
        assert match.tolist() != [0, 1, 2, 3]


def test_clusters_are_those_of_the_embeddings(train: Train) -> None:
    """From the bank where it is asked for: the mean of the large crops' embeddings."""
    written: list[tuple[Tensor, Tensor]] = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, method: Any, *_: Any) -> None:
            indices = method._written[0]
            # SphereFace's annealing follows it.
            assert method.criterion.step == len(written)
            keys = torch.stack([F.normalize(z, dim=1) for z in method.step_embeddings[:2]]).mean(0)
            mean = F.normalize(keys, dim=1)
            written.append((indices, mean))
            self.bank = method.bank

    steps = Steps()
    kwargs = {**ARCFACE, "clusters": {**ARCFACE["clusters"], "e_step": "bank"}}
    logged = train("metric", steps, method_kwargs=kwargs)
    assert steps.bank.filled.all()
    for indices, mean in written:
        torch.testing.assert_close(steps.bank.value[indices], mean)
    assert "e_step/objective_4" in logged
    assert 0 <= logged["train_class_weight_acc"] <= 1


def test_logged_names(train: Train, images: Any) -> None:
    common = {
        "train_class_loss_epoch",
        "train_acc1_epoch",
        "train_acc5_epoch",
        "train_metric_loss",
        "train_effective_rank",
        "train_alignment",
        "train_uniformity",
    }
    for loss, classes, more in (
        ("triplet_loss_func", "instance", {"train_mined_similarity"}),
        ("cosface_loss_func", "label", {"train_class_weight_acc"}),
        ("clip_loss_func", "instance", {"train_logit_scale"}),
        ("nt_xent_loss_func", "instance", set[str]()),
    ):
        kwargs = {"loss": loss, "classes": classes}
        logged = train("metric", method_kwargs=kwargs, data={"val_path": str(images)})
        assert {k for k in logged if k.startswith("train_")} == common | more
        assert all(torch.tensor(value).isfinite() for value in logged.values())
