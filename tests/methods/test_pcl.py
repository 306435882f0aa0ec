"""The method ``pcl`` on the installed host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.lab.training.prepare import prepare
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func
from solo_ext.methods import PCL
from tests.methods.steps import logged_by

MakeConfig = Callable[..., dict[str, Any]]
Build = Callable[..., Any]
Train = Callable[..., dict[str, float]]


@pytest.mark.parametrize("head", ["v1", "v2"])
def test_heads(build: Build, head: str) -> None:
    method = build(PCL, head=head, proj_hidden_dim=None)
    shapes = [tuple(p.shape) for p in method.projector.parameters()]
    assert shapes == {"v1": [(8, 8), (8,)], "v2": [(8, 8), (8,), (8, 8), (8,)]}[head]
    assert not any("BatchNorm" in type(layer).__name__ for layer in method.projector.modules())
    for one, two in zip(
        method.projector.parameters(), method.momentum_projector.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        assert not two.requires_grad


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("drawn", [None, 2])
def test_step_is_the_sum_of_its_terms(build: Build, symmetric: bool, drawn: int | None) -> None:
    settings = {"proto_weight": 0.3, "num_prototypes": [40, 30], "collisions": "merge"}
    # More prototypes than the batch has images, for the negatives to be drawn from.
    method = build(PCL, symmetric=symmetric, num_negatives=drawn, **settings).eval()
    logged = logged_by(method)
    indices, targets = torch.tensor([5, 19, 7, 0, 13, 12]), torch.tensor([0, 1, 2, 0, 1, 2])
    views = [torch.randn(6, 3, 16, 16) for _ in range(2)]
    batch = [indices, views, targets]
    method.on_train_batch_start(batch, 0)
    loss = method.training_step(batch, 0)

    directions = [(0, 1, method.queues[-1])]
    if symmetric:
        directions.append((1, 0, method.queues[0]))
    outs = [method(view) for view in views]
    z = [method.projector(out["feats"]) for out in outs]
    keys = [F.normalize(method.embed(view), dim=1) for view in views]
    info = [info_nce_loss_func(z[q], keys[k], queue.value, 0.2) for q, k, queue in directions]
    proto = []
    every = method.prototypes.assignments_of(indices)
    method.on_train_batch_start(batch, 0)
    of_all = method._negatives(every)
    for m, ids in enumerate(every):
        negatives = None if of_all is None else of_all[m]
        if drawn is not None:
            assert negatives is not None
            assert len(set(negatives.tolist()) - set(ids.tolist())) == drawn
        proto += [
            proto_nce_loss_func(
                z[q],
                method.prototypes.prototypes[m],
                method.prototypes.concentration[m],
                ids,
                negatives,
                "merge",
            )
            for q, _, _ in directions
        ]
    classify = [F.cross_entropy(outs[q]["logits"], targets) for q, _, _ in directions]
    expected = sum(info) / len(info) + 0.3 * sum(proto) / len(proto)
    expected = expected + sum(classify) / len(classify)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logged["train_proto_nce_loss"], sum(proto) / len(proto))
    assert {"train_proto_acc_40", "train_info_nce_loss"} <= set(logged)
    # Of the last batch, when the epoch ends.
    method.on_train_epoch_end()
    for name, ids in zip(("40", "30"), every.tolist(), strict=True):
        shared = sum(ids.count(one) > 1 for one in ids) / len(ids)
        assert logged[f"train_collisions_{name}"].item() == pytest.approx(shared)


@pytest.mark.parametrize("symmetric", [True, False])
def test_online_classifier_and_knn_see_the_queries(
    make_config: MakeConfig, symmetric: bool
) -> None:
    """What the host's step does with each view, done for each view that is a query."""
    config = make_config("pcl", method_kwargs={"symmetric": symmetric}, knn_eval={"enabled": True})
    method = PCL(prepare(config).cfg).eval()
    logged = logged_by(method)
    targets, views = torch.tensor([0, 1, 2, 0]), [torch.randn(4, 3, 16, 16) for _ in range(2)]
    method.training_step([torch.arange(4), views, targets], 0)
    outs = [method(view) for view in views[: 2 if symmetric else 1]]
    losses = [F.cross_entropy(out["logits"], targets) for out in outs]
    torch.testing.assert_close(logged["train_class_loss"], sum(losses) / len(losses))
    assert {"train_acc1", "train_acc5"} <= set(logged)
    stored = torch.cat(list(method.knn.train_features))
    torch.testing.assert_close(stored, torch.cat([out["feats"] for out in outs]).detach())
    assert len(torch.cat(list(method.knn.train_targets))) == len(stored)


def test_e_step_s_metrics(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="solo_ext"):
        logged = train("pcl", method_kwargs={"num_prototypes": [3, 40, 3]})
    for name in ("3", "40", "3_2"):
        for key in ("objective", "empty", "singletons", "nmi"):
            assert logged[f"e_step/{key}_{name}"] >= 0
        keys = [f"e_step/concentration_{key}_{name}" for key in ("min", "mean", "max")]
        low, mean, high = (logged[key] for key in keys)
        assert 0 < low <= mean <= high
        assert mean == pytest.approx(0.2, rel=0.02)
        assert 0 <= logged[f"train_proto_acc_{name}"] <= 1
        assert 0 <= logged[f"train_collisions_{name}"] <= 1
    assert logged["e_step/singletons_40"] > 20
    assert logged["train_collisions_3"] > logged["train_collisions_40"]
    (message,) = [m for m in caplog.messages if not m.startswith("patches of solo-learn")]
    assert message.startswith("E-step before epoch 1: 3+40+3 prototypes by torch k-means")


def test_prototypes_that_are_never_used_are_a_warning(
    train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    epochs: list[int] = []

    class Epochs(Callback):
        def on_train_end(self, trainer: Any, method: Any) -> None:
            epochs.append(method.prototypes.epoch)

    train("pcl", Epochs(), method_kwargs={"warmup_epochs": 1})
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "method_kwargs.warmup_epochs=1 of max_epochs=1: the prototypes will never be used"
    ]
    assert epochs == [-1]


@pytest.mark.parametrize("num_negatives", [None, 4])
def test_products_in_bfloat16(build: Build, num_negatives: int | None) -> None:
    """With queue and with prototypes, in both directions."""
    found: dict[str, dict[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    queries, keys = F.normalize(torch.randn(2, 2, 20, 8, generator=generator), dim=3)
    kwargs = {"num_negatives": num_negatives, "num_prototypes": [40, 48], "symmetric": True}
    for dtype in ("float32", "bfloat16"):
        method = build(PCL, compute_dtype=dtype, **kwargs)
        _, found[dtype] = method.contrast(list(queries), list(keys), torch.arange(20))
    for name in ("train_info_nce_loss", "train_proto_nce_loss"):
        exact, narrow = (found[dtype][name] for dtype in ("float32", "bfloat16"))
        assert not torch.equal(exact, narrow), name
        torch.testing.assert_close(exact, narrow, rtol=5e-3, atol=0)
