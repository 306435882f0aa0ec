"""What short runs of the contrastive methods and of ``metric`` log."""

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

Train = Callable[..., dict[str, float]]
EVERY = {"class_loss_epoch", "acc1_epoch", "acc5_epoch"}
GEOMETRY = {"effective_rank", "alignment", "uniformity"}
CONTRASTED = GEOMETRY | {"hardness"}
MIXED = {"mined_similarity", "mixed_similarity"}
QUEUE = {"queue_filled", "queue_age"}
NEAR = {"nn_acc", "nn_similarity", "nn_own", "support_filled", "support_age"}
RUNS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("debiased", {}, CONTRASTED | {"clamped_fraction"}),
    (
        "hard_negative",
        {"negatives": "queue", "queue_size": 48},
        CONTRASTED | {"clamped_fraction"} | QUEUE,
    ),
    ("mochi", {"exclude_own": True}, CONTRASTED | MIXED | QUEUE | {"mined_same_class"}),
    ("nnclr_symmetric", {}, CONTRASTED | NEAR),
    ("debiased", {"tau_plus": 0.0}, CONTRASTED),
    ("metric", {"loss": "triplet_loss_func"}, GEOMETRY | {"mined_similarity"}),
    (
        "metric",
        {"loss": "cosface_loss_func", "classes": "label"},
        GEOMETRY | {"class_weight_acc"},
    ),
    ("metric", {"loss": "clip_loss_func"}, GEOMETRY | {"logit_scale"}),
    ("metric", {"loss": "nt_xent_loss_func"}, GEOMETRY),
]


@pytest.mark.parametrize(("method", "kwargs", "names"), RUNS)
def test_logged_names(
    train: Train, images: Path, method: str, kwargs: dict[str, Any], names: set[str]
) -> None:
    logged = train(method, method_kwargs=kwargs, data={"val_path": str(images)})
    expected = {f"train_{key}" for key in EVERY | names | {f"{method}_loss"}}
    assert {key for key in logged if key.startswith("train_")} == expected
    assert all(torch.tensor(value).isfinite() for value in logged.values())
    assert {"val_loss", "val_acc1", "val_acc5"} <= set(logged), "validated without momentum too"
    assert 1 <= logged["train_effective_rank"] <= 8
    assert logged["train_uniformity"] < 0 < logged["train_alignment"]


def test_state_s_metrics(train: Train) -> None:
    """At the end of the second epoch of two steps: batches of 24, in queues of 60 and 100."""
    kwargs = {
        "negatives": "queue",
        "queue_size": 60,
        "positives": "nearest_neighbor",
        "support_set": {"size": 100},
    }
    logged = train("hard_negative", method_kwargs=kwargs, max_epochs=2)
    assert logged["train_queue_filled"] == 1
    # Ages 0 and 1, and half a batch of 2.
    assert logged["train_queue_age"] == pytest.approx((24 + 12 * 2) / 60)
    assert logged["train_support_filled"] == pytest.approx(4 * 24 / 100)
    assert logged["train_support_age"] == pytest.approx((0 + 1 + 2 + 3) / 4)


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
