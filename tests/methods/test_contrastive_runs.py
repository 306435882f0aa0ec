"""Short runs of the contrastive presets: what they log, and what is said before them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.losses.alignment import effective_rank

MakeConfig = Callable[..., dict[str, Any]]
Train = Callable[..., dict[str, float]]
EVERY = {"class_loss_epoch", "acc1_epoch", "acc5_epoch"}
GEOMETRY = {"hardness", "effective_rank", "alignment", "uniformity"}
MIXED = {"mined_similarity", "mixed_similarity"}
QUEUE = {"queue_filled", "queue_age"}
NEAR = {"nn_acc", "nn_similarity", "nn_own", "support_filled", "support_age"}
RUNS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "debiased": ("debiased", {}, {"clamped_fraction"}),
    "hard_negative": ("hard_negative", {}, {"clamped_fraction"}),
    "over a queue": (
        "hard_negative",
        {"negatives": "queue", "queue_size": 48},
        {"clamped_fraction"} | QUEUE,
    ),
    "mochi": ("mochi", {}, MIXED | QUEUE),
    "mochi of others": ("mochi", {"exclude_own": True}, MIXED | QUEUE | {"mined_same_class"}),
    "nnclr_symmetric": ("nnclr_symmetric", {}, NEAR),
    "simclr": ("debiased", {"tau_plus": 0.0}, set()),
}


@pytest.mark.parametrize("name", RUNS)
def test_logged_names(train: Train, images: Path, name: str) -> None:
    method, kwargs, more = RUNS[name]
    logged = train(method, method_kwargs=kwargs, data={"val_path": str(images)})
    expected = {f"train_{key}" for key in EVERY | GEOMETRY | more | {f"{method}_loss"}}
    assert {key for key in logged if key.startswith("train_")} == expected
    assert all(torch.tensor(value).isfinite() for value in logged.values())
    assert {"val_loss", "val_acc1", "val_acc5"} <= set(logged), "validated without momentum too"
    assert 1 <= logged["train_effective_rank"] <= 8
    assert logged["train_uniformity"] < 0 < logged["train_alignment"]


def test_state_s_metrics(train: Train) -> None:
    """Of the state that each step began with: batches of 24, in queues of 60 and 100."""
    kwargs = {
        "negatives": "queue",
        "queue_size": 60,
        "positives": "nearest_neighbor",
        "support_set": {"size": 100},
    }
    logged = train("hard_negative", method_kwargs=kwargs, max_epochs=2)
    assert logged["train_queue_filled"] == pytest.approx((48 / 60 + 1) / 2)
    # Ages 0 and 1, then 0, 1 and half a batch of 2.
    assert logged["train_queue_age"] == pytest.approx((0.5 + (24 + 12 * 2) / 60) / 2)
    assert logged["train_support_filled"] == pytest.approx((48 + 72) / 2 / 100)
    assert logged["train_support_age"] == pytest.approx((0.5 + 1) / 2)


def test_geometry_is_that_of_the_last_batch(train: Train) -> None:
    views: list[Tensor] = []

    class Last(Callback):
        def on_train_batch_end(self, trainer: Any, method: Any, *_: Any) -> None:
            views[:] = [F.normalize(z, dim=1) for z in method.step_embeddings[:2]]

    logged = train("debiased", Last())
    one, two = views
    assert logged["train_alignment"] == pytest.approx((one - two).square().sum(1).mean().item())
    distances = torch.pdist(one).square()
    uniformity = (-2 * distances).exp().mean().log().item()
    assert logged["train_uniformity"] == pytest.approx(uniformity, rel=1e-4)
    assert logged["train_effective_rank"] == pytest.approx(effective_rank(one).item())
