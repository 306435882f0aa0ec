"""What ``metric`` says of settings that do not do what a user may think."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.losses import LOSSES
from solo_ext.methods import Metric
from solo_ext.methods.metric import MetricKwargs, report_settings
from solo_ext.methods.metric_criteria import MarginCriterion, metric_losses, training_of

Build = Callable[..., Any]
TRIPLET, XENT = {"loss": "triplet_loss_func"}, {"loss": "nt_xent_loss_func"}
HARD = {"loss": "hard_negative_loss_func"}
CLUSTERS = {"num_prototypes": [3], "warmup_epochs": 0}
IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "mining": (
        {**XENT, "mining": "hard"},
        "method_kwargs.mining (nt_xent_loss_func is not of triplets, which alone are mined)",
    ),
    "clusters": (
        {**TRIPLET, "clusters": {"num_prototypes": [3], "e_step": "bank"}},
        "method_kwargs.clusters.num_prototypes, method_kwargs.clusters.e_step "
        "(classes=instance has no clusters)",
    ),
    "concentrations": (
        {**TRIPLET, "classes": "cluster", "clusters": {**CLUSTERS, "alpha": 5.0}},
        "method_kwargs.clusters.alpha (the loss does not read the clusters' concentrations)",
    ),
    "length": (
        {**XENT, "normalize": False},
        "method_kwargs.normalize (nt_xent_loss_func normalises by itself)",
    ),
    "weights": (
        {**HARD, "loss_kwargs": {"beta": 0.0, "detach_weights": True}},
        "method_kwargs.loss_kwargs.detach_weights (beta=0 has no weights)",
    ),
    "one layer": (
        {**XENT, "proj_layers": 1},
        "method_kwargs.proj_hidden_dim (proj_layers=1 has no hidden layer)",
    ),
}
READ: dict[str, dict[str, Any]] = {
    "mining": {**TRIPLET, "mining": "hard", "normalize": False},
    "clusters": {**TRIPLET, "classes": "cluster", "clusters": CLUSTERS},
    "weights": {**HARD, "loss_kwargs": {"detach_weights": True}},
    "no weights": {**HARD, "loss_kwargs": {"beta": 0.0, "detach_weights": False}},
    "length": {**XENT, "normalize": True},
}


def said(caplog: pytest.LogCaptureFixture, method: Any) -> str:
    caplog.clear()
    report_settings(method.cfg)
    return "\n".join(caplog.messages)


@pytest.mark.parametrize("case", IDLE)
def test_idle_settings(build: Build, caplog: pytest.LogCaptureFixture, case: str) -> None:
    kwargs, listed = IDLE[case]
    line = f"debiased: settings without effect on training: {listed}"
    assert said(caplog, build(Metric, **kwargs)) == line


@pytest.mark.parametrize("case", READ)
def test_settings_that_are_read(build: Build, caplog: pytest.LogCaptureFixture, case: str) -> None:
    assert said(caplog, build(Metric, **READ[case])) == ""


LENGTH: list[tuple[str, dict[str, Any]]] = [
    *((n, {}) for n in metric_losses() if LOSSES[n].origin == "solo_ext"),
    ("soft_nearest_neighbor_loss_func", {"distance": "cosine"}),
]


@pytest.mark.parametrize(("loss", "more"), LENGTH)
def test_who_loses_the_length(
    build: Build, features: Any, caplog: pytest.LogCaptureFixture, loss: str, more: dict[str, Any]
) -> None:
    """Said of those whose value stays when the embeddings shrink, and of no others."""
    classes = "label" if issubclass(training_of(loss).criterion, MarginCriterion) else "instance"
    method = build(Metric, loss=loss, loss_kwargs=more, classes=classes, normalize=False)
    views, targets = features(2), torch.tensor([0, 1, 2, 1])
    one, shorter = (
        method.compare([k * z for z in views], torch.arange(4), targets)[0] for k in (1, 0.2)
    )
    assert ("method_kwargs.normalize" in said(caplog, method)) == torch.allclose(one, shorter)


@pytest.mark.parametrize("loss", ["pml/NTXentLoss", "pml/ArcFaceLoss"])
def test_nothing_is_known_of_other_packages_losses(
    build: Build, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    pytest.importorskip("pytorch_metric_learning.losses")
    assert said(caplog, build(Metric, loss=loss, classes="label", normalize=False)) == ""


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"loss": "debiased_loss_func"}, False),
        ({"loss": "debiased_loss_func", "loss_kwargs": {"temperature": 0.2}}, True),
        ({"loss": "debiased_loss_func", "loss_kwargs": {"tau_plus": 0.3}}, True),
        ({**HARD, "loss_kwargs": {"tau_plus": 0.3}}, True),
        ({**HARD, "loss_kwargs": {"tau_plus": 0.3, "beta": 50.0}}, False),
        ({**HARD, "loss_kwargs": {"tau_plus": 0.0, "temperature": 0.1}}, False),
        (XENT, False),
    ],
    ids=str,
)
def test_floor(
    build: Build, caplog: pytest.LogCaptureFixture, given: dict[str, Any], warns: bool
) -> None:
    text = said(caplog, build(Metric, proj_output_dim=128, **given))
    assert text.startswith("method_kwargs.loss_kwargs.tau_plus=") if warns else text == ""
    assert ("most anchors will sit on the floor" in text) == warns


@pytest.mark.parametrize("first", [True, False])
def test_said_by_one_process(build: Build, caplog: pytest.LogCaptureFixture, first: bool) -> None:
    method = build(Metric, **XENT, mining="hard")
    assert "mining" not in caplog.text
    # The host may have had something to say.
    caplog.clear()
    method.trainer = SimpleNamespace(is_global_zero=first)
    method.on_train_start()
    assert len(caplog.messages) == first


@pytest.mark.parametrize("name", [n for n in shipped_configs() if n.endswith("/metric")])
def test_shipped_configs_have_none(caplog: pytest.LogCaptureFixture, name: str) -> None:
    given = compose(name)
    kwargs = check_method_kwargs(MetricKwargs, given["method_kwargs"])
    report_settings(OmegaConf.create({**given, "method_kwargs": kwargs}))
    assert caplog.messages == []
