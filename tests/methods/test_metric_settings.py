"""Settings of ``metric``: which losses there are, what is refused, other packages' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.losses import LOSSES
from solo_ext.methods import Metric
from solo_ext.methods.metric_criteria import (
    CRITERIA,
    Batch,
    LabelCriterion,
    NoiseCriterion,
    metric_losses,
    trains,
)
from tests.methods.steps import features

MakeConfig = Callable[..., dict[str, Any]]
Build = Callable[..., Any]
TRIPLET, MARGIN = {"loss": "triplet_loss_func"}, {"loss": "arcface_loss_func"}
CLUSTER = {"classes": "cluster", "clusters": {"num_prototypes": [3], "warmup_epochs": 0}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "loss", "required"),
    (
        {"loss": "triplet_los_func"},
        "loss",
        "='triplet_los_func': unknown loss; did you mean 'triplet_loss_func'",
    ),
    (
        {"loss": "info_nce_loss_func"},
        "loss",
        "no criterion trains it: .*business of a method of its own.*register it with",
    ),
    (
        {**TRIPLET, "loss_kwargs": {"margn": 1.0}},
        "loss_kwargs",
        "=.*'margn': 1.0.*unexpected.*margn.*triplet_loss_func takes .*margin",
    ),
    (
        {"loss": "contrastive_loss_func", "loss_kwargs": {"same": 1}},
        "loss_kwargs",
        "multiple values.*same",
    ),
    (
        {**TRIPLET, "loss_kwargs": {"margin": -1.0}},
        "loss_kwargs",
        r"=\{'margin': -1.0\}: margin=-1.0: must be at least 0",
    ),
    ({**TRIPLET, "loss_kwargs": {"margin": "one"}}, "loss_kwargs", "'one'"),
    (
        {"loss": "soft_nearest_neighbor_loss_func", "loss_kwargs": {"distance": "euclidian"}},
        "loss_kwargs",
        "must be 'sqeuclidean' or 'cosine'",
    ),
    (
        {"loss": "clip_loss_func", "loss_kwargs": {"logit_scale": 0}},
        "loss_kwargs",
        "logit_scale=0: must be above 0",
    ),
    (
        {"loss": "nce_loss_func", "loss_kwargs": {"temperature": 0.0}},
        "loss_kwargs",
        "temperature=0.0: must be above 0",
    ),
    (
        {**MARGIN, "classes": "instance"},
        "classes",
        "='instance': arcface_loss_func does not train with them; allowed: label, cluster",
    ),
    (
        {"loss": "nt_xent_loss_func", "classes": "label"},
        "classes",
        "='label': nt_xent_loss_func does not train with them; allowed: instance",
    ),
    (
        {**TRIPLET, **CLUSTER, "clusters": {"num_prototypes": [3, 4]}},
        "clusters.num_prototypes",
        r"=\[3, 4\]: an image has one class; give one number",
    ),
    (
        {**MARGIN, **CLUSTER, "clusters": {"num_prototypes": [3], "warmup_epochs": 1}},
        "clusters.warmup_epochs",
        "=1: arcface_loss_func needs classes from the first epoch on; take 0",
    ),
    (
        {**TRIPLET, **CLUSTER, "clusters": {"kmeans": {"backend": "flash"}}},
        "clusters.kmeans.backend",
        "='flash': needs CUDA",
    ),
    (
        {**TRIPLET, **CLUSTER, "clusters": {"num_prototypes": [49]}},
        "clusters.num_prototypes",
        r"=\[49\]: the training set has 48 images",
    ),
    (
        {**TRIPLET, "clusters": {"num_prototype": [3]}},
        "clusters.num_prototype",
        "did you mean 'num_prototypes'",
    ),
]


@pytest.mark.parametrize(("given", "key", "message"), REFUSED, ids=str)
def test_refused(make_config: MakeConfig, given: dict[str, Any], key: str, message: str) -> None:
    config = make_config("metric")
    config["method_kwargs"] = {"proj_hidden_dim": 16, **given}
    with pytest.raises(ConfigError, match=rf"method_kwargs\.{key}.*{message}") as caught:
        prepare(config)
    assert caught.value.key == f"method_kwargs.{key}"


@pytest.mark.parametrize(
    "data", [{"no_labels": True}, {"dataset": "stl10"}], ids=["no labels", "stl10"]
)
def test_labels_that_are_not_there(build: Build, data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"classes='label'.*labels; allowed: instance, cluster"):
        build(Metric, data=data, **TRIPLET, classes="label")
    build(Metric, data=data, **TRIPLET)
    build(Metric, data=data, **TRIPLET, **CLUSTER)


def test_values_are_tried_without_a_trace(build: Build) -> None:
    """The weights that are drawn next are the same."""
    shapes = {"loss": "arcface_loss_func", "classes": "label"}
    one = build(Metric, **shapes)
    two = build(Metric, **shapes, loss_kwargs={"margin": 0.3})
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.fixture
def registered() -> Iterator[Callable[[Any], str]]:
    """Registers a loss under its own name until the test ends."""
    names: list[str] = []

    def add(loss: Any) -> str:
        LOSSES.register(loss.__name__)(loss)
        names.append(loss.__name__)
        return names[-1]

    yield add
    for name in names:
        del LOSSES[name]
        CRITERIA.pop(name, None)


def test_losses_of_other_packages(build: Build, registered: Callable[[Any], str]) -> None:
    """Trained as they register, and not otherwise."""

    def someones_loss(x: Tensor, targets: Tensor, power: float = 1.0) -> Tensor:
        return (x.sum(1) * targets).abs().pow(power).mean()

    name = registered(someones_loss)
    assert name not in metric_losses()
    with pytest.raises(ConfigError, match="business of a method of its own"):
        build(Metric, loss=name)
    trains(name)(LabelCriterion)
    assert name in metric_losses()
    with pytest.raises(ConfigError, match=r"loss_kwargs=.*'powr'; someones_loss takes .*power"):
        build(Metric, loss=name, loss_kwargs={"powr": 2.0}, classes="label")
    method = build(Metric, loss=name, loss_kwargs={"power": 2.0}, classes="label")
    views, targets = features(2), torch.tensor([0, 1, 2, 1])
    found, _ = method.compare(views, torch.arange(4), targets)
    unit = torch.cat([F.normalize(z, dim=1) for z in views])
    torch.testing.assert_close(found, someones_loss(unit, targets.repeat(2), 2.0))


def test_what_a_criterion_takes_is_not_the_losss(
    build: Build, registered: Callable[[Any], str]
) -> None:
    """Named by the constructor of any of its classes."""

    def someones_logits(data: Tensor, noise: Tensor, power: float = 1.0) -> Tensor:
        return (noise.logsumexp(1) - data).pow(power).mean()

    class Shifted(NoiseCriterion):
        def __init__(self, loss: Any, batch: Batch, shift: float = 0.0, **given: Any) -> None:
            super().__init__(loss, batch, **given)

    name = registered(someones_logits)
    trains(name)(Shifted)
    build(Metric, loss=name, loss_kwargs={"temperature": 0.5, "shift": 1.0, "power": 2.0})
    with pytest.raises(ConfigError, match="'given'"):
        build(Metric, loss=name, loss_kwargs={"given": 1})


def test_without_the_package(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)
    message = r"loss='pml/NCALoss'.*not installed.*solo-ext\[metric\]"
    with pytest.raises(ConfigError, match=message):
        build(Metric, loss="pml/NCALoss")


def test_losses_of_pytorch_metric_learning(build: Build) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    views, targets = features(2), torch.tensor([0, 1, 2, 1])
    unit = torch.cat([F.normalize(z, dim=1) for z in views])
    kwargs = {"loss": "pml/NTXentLoss", "loss_kwargs": {"temperature": 0.3}}
    found, _ = build(Metric, **kwargs).compare(views, torch.arange(4), targets)
    expected = losses.NTXentLoss(temperature=0.3)(unit, torch.arange(4).repeat(2))
    torch.testing.assert_close(found, expected)
    # One with weights of its own, as many as there are classes.
    method = build(Metric, loss="pml/ArcFaceLoss", classes="label")
    assert method.criterion.loss.W.shape == (8, 3)
    found, _ = method.compare(views, torch.arange(4), targets)
    torch.testing.assert_close(found, method.criterion.loss(unit, targets.repeat(2)))
    learnt = [id(p) for group in method.learnable_params for p in group["params"]]
    assert sorted(learnt) == sorted(id(p) for p in method.parameters())
    for classes in ("instance", "cluster"):
        with pytest.raises(ConfigError, match=r"classes=.*allowed: label"):
            build(Metric, loss="pml/ArcFaceLoss", classes=classes)
    with pytest.raises(ConfigError, match=r"no such loss; did you mean 'NTXentLoss'"):
        build(Metric, loss="pml/NTXenLoss")
    with pytest.raises(ConfigError, match=r"loss_kwargs=\{\}.*required.*'loss'"):
        build(Metric, loss="pml/SelfSupervisedLoss")
    with pytest.raises(ConfigError, match=r"temprature.*NTXentLoss takes temperature"):
        build(Metric, loss="pml/NTXentLoss", loss_kwargs={"temprature": 1.0})
