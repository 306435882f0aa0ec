"""The method ``metric``: each kind of loss gets what it compares, and its value is the loss's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import LOSSES, clip_loss_func, triplet_loss_func, uniformity_loss_func
from solo_ext.methods import Metric
from solo_ext.methods.metric_criteria import metric_losses
from tests.methods.steps import features, gradients, logged_by

Build = Callable[..., Any]
INDICES, TARGETS = torch.tensor([3, 11, 7, 0, 5]), torch.tensor([0, 1, 0, 2, 1])
MARGINS = ("arcface_loss_func", "cosface_loss_func", "sphereface_loss_func")


def pairs(views: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Every crop with each large crop that it is not."""
    return [(z, views[0]) for z in views[1:]] + [(z, views[1]) for z in views[:1] + views[2:]]


def mean(values: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


def of_targets(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    return loss(torch.cat(views), torch.cat([classes] * len(views)))  # type: ignore[no-any-return]


def of_views(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    return mean(loss(a, b) for a, b in pairs(views))


def of_rows(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    return mean(loss(z) for z in views)


def of_scaled_views(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    return mean(loss(a, b, method.criterion.log_scale.exp()) for a, b in pairs(views))


def of_pairs(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    """Both views of an image, and one with a view of the next, the last's next being the first."""
    losses = []
    for a, b in pairs(views):
        rows = range(len(classes))
        after = [(i + 1) % len(rows) for i in rows]
        x = torch.stack([a[i] for i in rows] + [a[i] for i in rows])
        y = torch.stack([b[i] for i in rows] + [b[j] for j in after])
        same = [True for _ in rows] + [bool(classes[i] == classes[j]) for i, j in enumerate(after)]
        losses.append(loss(x, y, torch.tensor(same)))
    return torch.stack(losses).mean()


def of_triplets(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    """The nearest of another class that is farther than the positive; else the farthest."""
    losses = []
    for a, b in pairs(views):
        for i, own in enumerate(classes):
            others = [b[j] for j, c in enumerate(classes) if c != own]
            distances = [(a[i] - z).norm().item() for z in others]
            beyond = [d for d in distances if d > (a[i] - b[i]).norm().item()]
            wanted = min(beyond) if beyond else max(distances)
            negative = others[distances.index(wanted)]
            losses.append(loss(*(x.unsqueeze(0) for x in (a[i], b[i], negative))))
    return torch.stack(losses).mean()


def of_margins(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    x, weight = torch.cat(views), method.criterion.class_weights.weight
    cosine = F.normalize(x, dim=1) @ F.normalize(weight, dim=1).T
    more = {"feature_norm": x.norm(dim=1)} if loss is SPHEREFACE else {}
    return loss(cosine, torch.cat([classes] * len(views)), **more)  # type: ignore[no-any-return]


def of_noise(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    losses = []
    for a, b in pairs(views):
        logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.2 - math.log(len(a) - 1)
        others = [[j for j in range(len(a)) if j != i] for i in range(len(a))]
        noise = torch.stack([logits[i, js] for i, js in enumerate(others)])
        losses.append(loss(logits.diagonal(), noise))
    return torch.stack(losses).mean()


def of_critic(loss: Any, method: Any, views: list[Tensor], classes: Tensor) -> Tensor:
    return mean(loss(a, b, method.criterion.critic.weight) for a, b in pairs(views))


SPHEREFACE = LOSSES["sphereface_loss_func"].target
KINDS: dict[str, Any] = {
    "soft_nearest_neighbor_loss_func": of_targets,
    "lifted_structured_loss_func": of_targets,
    "nt_xent_loss_func": of_views,
    "debiased_loss_func": of_views,
    "hard_negative_loss_func": of_views,
    "alignment_loss_func": of_views,
    "n_pair_loss_func": of_views,
    "uniformity_loss_func": of_rows,
    "clip_loss_func": of_scaled_views,
    "contrastive_loss_func": of_pairs,
    "triplet_loss_func": of_triplets,
    "arcface_loss_func": of_margins,
    "cosface_loss_func": of_margins,
    "sphereface_loss_func": of_margins,
    "nce_loss_func": of_noise,
    "bilinear_info_nce_loss_func": of_critic,
}


def made(build: Build, name: str, **kwargs: Any) -> tuple[Any, Tensor]:
    """A method with this loss, and the classes of a batch that it trains with."""
    classes = "label" if name in MARGINS else "instance"
    method = build(Metric, loss=name, classes=classes, **kwargs)
    return method, TARGETS if classes == "label" else INDICES


def test_every_metric_loss_has_a_test() -> None:
    """All registered ones but those that compare with queues, neighbours or prototypes."""
    own = {n for n in metric_losses() if LOSSES[n].target.__module__.startswith("solo_ext.")}
    assert own == set(KINDS)
    left = {"info_nce_loss_func", "mochi_loss_func", "nnclr_symmetric_loss_func"}
    assert left <= set(LOSSES) - set(metric_losses())


@pytest.mark.parametrize("small", [0, 2])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "raw"])
@pytest.mark.parametrize("name", KINDS)
def test_loss_is_the_registered_function(
    build: Build, name: str, normalize: bool, small: int
) -> None:
    method, classes = made(build, name, small=small, normalize=normalize)
    views = [z * (0.5 + number) for number, z in enumerate(features(2 + small, rows=5))]
    loss, metrics = method.compare(views, INDICES, TARGETS)
    used = [F.normalize(z, dim=1) for z in views] if normalize else views
    expected = KINDS[name](LOSSES[name].target, method, used, classes)
    torch.testing.assert_close(loss, expected)
    learnt = list(method.criterion.parameters())
    inputs = [*views, *learnt]
    torch.testing.assert_close(gradients(loss, inputs), gradients(expected, inputs))
    assert all(value.isfinite() and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("soft_nearest_neighbor_loss_func", {"temperature": 0.3, "distance": "cosine"}),
        ("triplet_loss_func", {"margin": 0.2, "squared": False}),
        ("arcface_loss_func", {"scale": 8.0, "margin": 0.2}),
        ("nt_xent_loss_func", {"temperature": 0.1}),
    ],
)
def test_hyper_parameters_reach_the_loss(build: Build, name: str, given: dict[str, Any]) -> None:
    (method, classes), views = made(build, name, loss_kwargs=given), features(2, rows=5)
    target = functools.partial(LOSSES[name].target, **given)
    expected = KINDS[name](target, method, [F.normalize(z, dim=1) for z in views], classes)
    torch.testing.assert_close(method.compare(views, INDICES, TARGETS)[0], expected)


@pytest.mark.parametrize("classes", ["instance", "label", "cluster"])
def test_classes(build: Build, classes: str) -> None:
    """Image numbers, labels, or the clusters of the images by their numbers."""
    name = "soft_nearest_neighbor_loss_func"
    clusters = {"num_prototypes": [3]}
    method = build(Metric, loss=name, classes=classes, clusters=clusters)
    views = features(2, rows=5)
    loss, _ = method.compare(views, INDICES, TARGETS)
    expected = {
        "instance": torch.arange(5),
        "label": TARGETS,
        "cluster": method.prototypes.assignments[0][INDICES] if classes == "cluster" else None,
    }
    unit = torch.cat([F.normalize(z, dim=1) for z in views])
    losses = {
        k: LOSSES[name].target(unit, c.repeat(2)).item()
        for k, c in expected.items()
        if c is not None
    }
    assert loss.item() == pytest.approx(losses[classes])
    for one, two in itertools.combinations(losses.values(), 2):
        assert one != pytest.approx(two, rel=1e-3)
    if classes == "cluster":
        method.prototypes.epoch = -1
        loss, _ = method.compare(views, INDICES, TARGETS)
        assert loss.item() == pytest.approx(losses["instance"]), "before the first E-step"


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_uniformity_beside_the_loss(build: Build, weight: float) -> None:
    """With alignment the loss of Wang and Isola; of unit rows, whatever the loss takes."""
    for normalize in (True, False):
        method = build(
            Metric, loss="alignment_loss_func", uniformity_weight=weight, normalize=normalize
        )
        views = features(2, rows=5)
        unit = [F.normalize(z, dim=1) for z in views]
        a, b = unit if normalize else views
        expected = (a - b).square().sum(1).mean()
        expected = expected + weight * sum(uniformity_loss_func(z) for z in unit) / 2
        torch.testing.assert_close(method.compare(views, INDICES, TARGETS)[0], expected)


def test_clip_learns_its_scale(build: Build) -> None:
    method = build(Metric, loss="clip_loss_func")
    views = features(2, rows=5)
    loss, metrics = method.compare(views, INDICES, TARGETS)
    assert metrics["train_logit_scale"] == pytest.approx(1 / 0.07, rel=1e-5)
    groups = {g["name"]: list(g["params"]) for g in method.learnable_params}
    assert groups["criterion"] == [method.criterion.log_scale]
    loss.backward()
    assert method.criterion.log_scale.grad.abs() > 0
    method.criterion.log_scale.data.fill_(9.0)
    method.zero_grad()
    loss, metrics = method.compare(views, INDICES, TARGETS)
    assert metrics["train_logit_scale"] == pytest.approx(100, rel=1e-5)
    # From beyond the cap there is a way back.
    loss.backward()
    assert method.criterion.log_scale.grad.abs() > 0
    for scale in (3.0, 200.0):
        method = build(Metric, loss="clip_loss_func", loss_kwargs={"logit_scale": scale})
        assert not method.criterion.log_scale.requires_grad
        loss, _ = method.compare(views, INDICES, TARGETS)
        expected = clip_loss_func(*(F.normalize(z, dim=1) for z in views), scale)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", KINDS)
def test_embeddings_keep_their_length_where_it_means_something(name: str, build: Build) -> None:
    raw = {"n_pair_loss_func", "sphereface_loss_func", "bilinear_info_nce_loss_func"}
    losses = {}
    method, _ = made(build, name)
    views = [3 * z for z in features(2, rows=5)]
    for normalize in (None, True, False):
        method.kwargs = method.kwargs.model_copy(update={"normalize": normalize})
        losses[normalize] = method.compare(views, INDICES, TARGETS)[0]
    torch.testing.assert_close(losses[None], losses[name not in raw])
    if name in raw:
        assert (losses[True] - losses[False]).abs() > 1e-3


def test_sphereface_s_annealing_falls(build: Build) -> None:
    """lambda = max(5, 1000 / (1 + 0.12 n)) in step n, as the authors train."""
    given = {"annealing": 5.0, "annealing_start": 1000.0}
    method = build(Metric, loss="sphereface_loss_func", classes="label", loss_kwargs=given)
    views = features(2, rows=5)
    for step, expected in ((0, 1000 / 1.12), (99, 1000 / 13), (10_000, 5.0)):
        method.criterion.step = step
        loss, _ = method.compare(views, INDICES, TARGETS)
        x = torch.cat(views)
        cosine, norms = method.criterion.class_weights(x), x.norm(dim=1)
        known = SPHEREFACE(cosine, TARGETS.repeat(2), feature_norm=norms, annealing=expected)
        torch.testing.assert_close(loss, known)


def test_every_parameter_is_learnt_once(build: Build) -> None:
    for name in KINDS:
        method, _ = made(build, name)
        learnt = [id(p) for group in method.learnable_params for p in group["params"]]
        assert sorted(learnt) == sorted(id(p) for p in method.parameters())
        names = [group["name"] for group in method.learnable_params]
        more = ["criterion"] if list(method.criterion.parameters()) else []
        assert names == ["backbone", "classifier", "projector", *more]


def test_class_weight_accuracy(build: Build) -> None:
    method = build(Metric, loss="arcface_loss_func", classes="label")
    weight = method.criterion.class_weights.weight.detach()
    assert weight.shape == (3, 8)
    view = weight[TARGETS] + 0.01
    _, metrics = method.compare([view, 2 * view], INDICES, TARGETS)
    assert metrics["train_class_weight_acc"] == 1
    _, metrics = method.compare([view, -view], INDICES, TARGETS)
    assert metrics["train_class_weight_acc"] == 0.5


def test_step_is_the_loss_of_the_embeddings(build: Build) -> None:
    """Of all crops, with the classes of the batch; plus the classifier's loss."""
    method = build(Metric, small=1, loss="soft_nearest_neighbor_loss_func", classes="label").eval()
    logged = logged_by(method)
    views = [torch.randn(5, 3, side, side) for side in (16, 16, 8)]
    loss = method.training_step([INDICES, views, TARGETS], 0)
    z = [method.projector(method.backbone(view)) for view in views]
    expected, _ = method.compare(z, INDICES, TARGETS)
    torch.testing.assert_close(logged[f"train_{method.cfg.method}_loss"], expected)
    torch.testing.assert_close(loss, expected + logged["train_class_loss"])
    loss.backward()
    assert all(p.grad is not None for p in method.parameters())


CLASSES = torch.tensor([0, 1, 1, 2, 0])


def on_a_line(*places: float) -> Tensor:
    """Embeddings (N, 8) at some distances along one axis."""
    rows = torch.zeros(len(places), 8)
    rows[:, 0] = torch.tensor(places)
    return rows.requires_grad_()


A = on_a_line(0.0, 10.0, 20.0, 30.0, 40.0)
B = on_a_line(3.0, 9.0, 23.0, 1.0, 100.0)
"""Rows 0 and 4 are of one class, 1 and 2 of one. Distances of row 0 to others: 9, 23, 1."""


@pytest.mark.parametrize(
    ("mining", "rows"),
    [
        # The nearest of another class. Of row 1, at 10: 3, 1 and 100. Of row 2, at 20: the same.
        # Row 3: 23; row 4: 23.
        ("hard", [3, 0, 0, 2, 2]),
        # The nearest beyond the positive. Row 0's is at 3: not 1, but 9. Row 1: beyond 1 the
        # nearest is 3. Row 2: beyond 3. Row 3's positive is 29 away: only 100 is farther. Row 4's
        # 60: nothing is, and 1 is farthest.
        ("semi_hard", [1, 0, 0, 4, 3]),
        # The next.
        ("random", [1, 3, 3, 4, 1]),
    ],
)
def test_mining(build: Build, mining: str, rows: list[int]) -> None:
    method = build(Metric, loss="triplet_loss_func", mining=mining, classes="label")
    seen: list[Tensor] = []

    def note(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        seen.extend((anchor, positive, negative))
        return triplet_loss_func(anchor, positive, negative)

    method.criterion.loss = note
    method.criterion([A, B], CLASSES)
    assert torch.equal(seen[0], A)
    assert torch.equal(seen[1], B)
    assert [int((row == B).all(1).nonzero()[0]) for row in seen[2]] == rows


@pytest.mark.parametrize("mining", ["hard", "semi_hard", "random"])
def test_without_another_class_there_is_nothing_to_learn(build: Build, mining: str) -> None:
    """Zero with zero gradient; rows that have a negative are left as they are."""
    method = build(Metric, loss="triplet_loss_func", mining=mining, classes="label")
    views, one = features(2), torch.zeros(4, dtype=torch.long)
    loss, metrics = method.compare(views, torch.arange(4), one)
    assert loss.item() == 0
    assert not any(g.any() for g in gradients(loss, views))
    assert metrics["train_mined_similarity"].isfinite()
    loss, _ = method.compare([views[0].detach()] * 2, torch.arange(4), one)
    assert loss.item() == 0


@pytest.mark.parametrize("mining", ["hard", "semi_hard"])
def test_collapsed_embeddings(build: Build, mining: str) -> None:
    method = build(Metric, loss="triplet_loss_func", mining=mining)
    views = [torch.ones(4, 8).requires_grad_() for _ in range(2)]
    loss, metrics = method.compare(views, torch.arange(4), torch.arange(4))
    assert loss.item() == pytest.approx(1.0, abs=1e-5)
    assert all(g.isfinite().all() for g in gradients(loss, views))
    assert metrics["train_mined_similarity"] == pytest.approx(1.0)
