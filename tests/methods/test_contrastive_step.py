"""A training step of the contrastive methods: who is query and key, what is drawn, warm-ups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError
from solo_ext.memory.heads import split_batch_norm
from solo_ext.methods import PCL
from solo_ext.methods.contrastive import Contrastive
from tests.methods.contrastive_ranks import CONTRASTIVE
from tests.methods.steps import features, logged_by

Build = Callable[..., Any]
NEAR = {"positives": "nearest_neighbor", "support_set": {"size": 12}, "pred_hidden_dim": 16}
FROM_QUEUE = {"negatives": "queue", "queue_size": 9}
MIXES = {"num_hard": 4, "num_pair_mixes": 6, "num_query_mixes": 3, "warmup_epochs": 0}


def batch(crops: int = 2) -> list[Any]:
    """Six random images, two of them without label."""
    generator = torch.Generator().manual_seed(0)
    sides = [16, 16, 8, 8][:crops]
    views = [torch.randn(6, 3, side, side, generator=generator) for side in sides]
    return [torch.arange(6), views, torch.tensor([0, 1, 2, 0, -1, -1])]


def test_parts_of_the_batch_are_normalised_by_themselves(build: Build) -> None:
    """Queries in order, keys in an order that is drawn and taken back; the same at evaluation."""
    kwargs = {**FROM_QUEUE, "proj_batch_norm": False}
    plain, split = (build(**kwargs, batch_norm_splits=n) for n in (1, 3))
    split.load_state_dict(plain.state_dict())
    images = torch.randn(6, 3, 16, 16)
    found, parts = split(images)["z"], [plain(images[i::3])["z"] for i in range(3)]
    for i, part in enumerate(parts):
        torch.testing.assert_close(found[i::3], part, atol=1e-4, rtol=1e-3)
    for name, mean in split.backbone.named_buffers():
        assert mean.isfinite().all(), name
    torch.manual_seed(5)
    keys = split.momentum_forward(images)["z"]
    torch.manual_seed(5)
    order = torch.randperm(6)
    for i in range(3):
        own = order[i::3]
        part = plain.momentum_forward(images[own])["z"]
        torch.testing.assert_close(keys[own], part, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(keys, plain.momentum_forward(images)["z"], atol=1e-2)
    split.eval()
    plain.load_state_dict(split.state_dict())
    torch.testing.assert_close(split(images)["z"], plain.eval()(images)["z"])


def test_running_statistics_are_the_mean_of_the_parts() -> None:
    layer = split_batch_norm(nn.BatchNorm2d(3), 2)
    images, parts = torch.randn(6, 3, 4, 4), [nn.BatchNorm2d(3) for _ in range(2)]
    layer(images)
    for i, part in enumerate(parts):
        part(images[i::2])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        expected = torch.stack([getattr(part, name).float() for part in parts]).mean(0)
        torch.testing.assert_close(getattr(layer, name).float(), expected)


def test_a_backbone_without_batch_norm_has_nothing_to_split() -> None:
    with pytest.raises(ConfigError, match=r"method_kwargs.batch_norm_splits=8: .* take 1"):
        split_batch_norm(nn.Sequential(nn.LayerNorm(3)), 8)


@pytest.mark.parametrize("small", [0, 1])
@pytest.mark.parametrize(
    "kwargs",
    [{}, NEAR, FROM_QUEUE, {**NEAR, **FROM_QUEUE}],
    ids=["batch", "near", "queue", "near, queue"],
)
def test_queries_and_keys(
    build: Build, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], small: int
) -> None:
    """Queries: predictions of all crops, keys: embeddings of the large ones, without gradient."""
    method = build(small=small, **kwargs).eval()
    # Momentum networks that are not the online ones.
    for name, p in method.named_parameters():
        if name.startswith("momentum"):
            p.data += 0.1 * torch.randn_like(p)
    logged, given = logged_by(method), batch(2 + small)
    seen: list[Any] = []
    contrast = method.contrast

    def note(*args: Any) -> Any:
        seen.extend(args)
        return contrast(*args)

    monkeypatch.setattr(method, "contrast", note)
    loss = method.training_step(given, 0)
    queries, keys, indices, targets = seen
    assert indices is given[0]
    assert targets is given[2]
    assert len(queries) == 2 + small
    for view, query in zip(given[1], queries, strict=True):
        expected = method.projector(method.backbone(view))
        expected = expected if method.predictor is None else method.predictor(expected)
        torch.testing.assert_close(query, expected)
        assert query.requires_grad
    assert len(keys) == 2
    for view, key in zip(given[1][:2], keys, strict=True):
        if kwargs.get("negatives") == "queue":
            z = method.momentum_projector(method.momentum_backbone(view))
        else:
            z = method.projector(method.backbone(view))
        torch.testing.assert_close(key, F.normalize(z.detach(), dim=1))
        assert not key.requires_grad
    classify = [
        F.cross_entropy(method(view)["logits"], targets, ignore_index=-1) for view in given[1][:2]
    ]
    torch.testing.assert_close(logged["train_class_loss"], sum(classify) / 2)
    torch.testing.assert_close(loss, logged["train_debiased_loss"] + sum(classify) / 2)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (CONTRASTIVE, NEAR),
        (CONTRASTIVE, FROM_QUEUE),
        (CONTRASTIVE, {**NEAR, **FROM_QUEUE}),
        (PCL, {"num_prototypes": [3, 4], "queue_size": 9, "symmetric": True}),
    ],
    ids=str,
)
def test_gradients_go_to_the_online_networks_alone(
    build: Build, kind: Any, kwargs: dict[str, Any]
) -> None:
    # timm starts residual branches at zero, which keeps gradients from their first layers.
    method = build(kind, **kwargs)
    for name, p in method.named_parameters():
        if "bn2.weight" in name:
            p.data.fill_(1.0)
    logged_by(method)
    method.training_step(batch(), 0).backward()
    for name, p in method.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) != name.startswith("momentum"), name


def test_the_online_classifier_learns_alone(build: Build) -> None:
    """Its loss goes no further than the features: other weights of it change no other gradient."""
    found = []
    for scale in (1, 5):
        method = build()
        method.classifier.weight.data *= scale
        logged_by(method)
        method.training_step(batch(), 0).backward()
        found.append({name: p.grad for name, p in method.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]) != name.startswith("classifier"), name


def test_draws_follow_seed_rank_epoch_and_step(
    build: Build, draws: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in each direction, and the same again at the same place."""
    method = build(**FROM_QUEUE, mixing=MIXES)
    logged_by(method)
    place = {"rank": 0, "epoch": 0, "step": 0, "seed": 5}
    monkeypatch.setattr(Contrastive, "current_epoch", property(lambda _: place["epoch"]))
    monkeypatch.setattr("solo_ext.core.distributed.rank", lambda: place["rank"])

    def drawn(**changes: int) -> list[Tensor]:
        place.update({"rank": 0, "epoch": 0, "step": 0, "seed": 5, **changes})
        method._seed = place["seed"]
        draws.clear()
        method.on_train_batch_start(batch(), place["step"])
        method.training_step(batch(), place["step"])
        assert len(draws) == 2
        return [torch.cat([x.flatten().double() for x in d]) for d in draws]

    first = drawn()
    for one, two in zip(first, drawn(), strict=True):
        assert torch.equal(one, two)
    others = [x for k in ("rank", "epoch", "step", "seed") for x in drawn(**{k: 1})]
    every = [*first, *others]
    assert len({tuple(x.tolist()) for x in every}) == len(every) == 10


def test_mining_takes_what_a_small_batch_has(build: Build, draws: list[Any]) -> None:
    """All other images' crops, and no crop of one's own image."""
    for kwargs, available in (({}, 10), (NEAR, 5), (FROM_QUEUE, 9)):
        method = build(**kwargs, mixing={**MIXES, "num_hard": 9 if kwargs is FROM_QUEUE else 1024})
        logged = logged_by(method)
        method.training_step(batch(), 0)
        assert {int(x) for d in draws for x in d.pair_indices.flatten()} == set(range(available))
        assert logged["train_mined_similarity"].isfinite()
        draws.clear()


@pytest.mark.parametrize(("epoch", "mixes"), [(0, False), (1, False), (2, True), (3, True)])
@pytest.mark.parametrize("negatives", ["batch", "queue"])
def test_nothing_is_mixed_in_warm_up_epochs(
    build: Build, negatives: str, epoch: int, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contrastive, "current_epoch", property(lambda _: epoch))
    queries, indices = features(2), torch.arange(4)
    keys = [F.normalize(z.detach(), dim=1) for z in queries]
    shared = FROM_QUEUE if negatives == "queue" else {}
    mixing = build(**shared, mixing={**MIXES, "warmup_epochs": 2})
    loss, metrics = mixing.contrast(queries, keys, indices, indices)
    plain = build(**shared)
    plain.queues = mixing.queues
    expected, without = plain.contrast(queries, keys, indices, indices)
    assert (loss.item() > expected.item() + 1e-3) == mixes
    assert torch.equal(loss, expected) == (not mixes)
    more = {"train_mined_similarity", "train_mixed_similarity"} if mixes else set()
    assert set(metrics) == set(without) | more


@pytest.mark.parametrize("batch_norm", [True, False])
def test_heads(build: Build, batch_norm: bool) -> None:
    method = build(proj_batch_norm=batch_norm)
    kinds = [type(layer).__name__ for layer in method.projector]
    assert ("BatchNorm1d" in kinds) == batch_norm
    # A bias that the batch norm removes again would be a parameter without effect.
    assert (method.projector[0].bias is None) == batch_norm
    assert method.eval()(torch.randn(4, 3, 16, 16))["z"].shape == (4, 8)
