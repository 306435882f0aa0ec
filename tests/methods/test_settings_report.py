"""What methods say of settings that do not do what a user may think."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core import distributed
from solo_ext.core.types import PositiveInt, Section
from solo_ext.losses import LOSSES
from solo_ext.methods import (
    METHODS,
    Debiased,
    HardNegative,
    Metric,
    MoCHi,
    NNCLRSymmetric,
    contrastive_kwargs,
    metric,
)
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.metric_criteria import MarginCriterion, metric_losses, training_of
from solo_ext.methods.registry import warn_of_idle_settings, warn_of_the_floor

CONTRASTIVE = Preset(ContrastiveKwargs)
Build = Callable[..., Any]


PRESETS = ("debiased", "hard_negative", "mochi", "nnclr_symmetric")
NEAR, QUEUE = {"positives": "nearest_neighbor"}, {"negatives": "queue", "queue_size": 48}
PROTOTYPES = {"positives": "prototype", "clusters": {"num_prototypes": [3], "warmup_epochs": 0}}
SUPPORT = {"support_set": {"size": 30, "exclude_own": True}}
MIXES = {"num_pair_mixes": 4, "warmup_epochs": 0}
ALPHA = {"num_prototypes": [3], "warmup_epochs": 0, "alpha": 5.0}
TRIPLET, XENT = {"loss": "triplet_loss_func"}, {"loss": "nt_xent_loss_func"}
HARD = {"loss": "hard_negative_loss_func"}
CLUSTERS = {"num_prototypes": [3], "warmup_epochs": 0}
IDLE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "clusters of views": (
        CONTRASTIVE,
        {"clusters": {"num_prototypes": [3], "kmeans": {"iterations": 3}}},
        "method_kwargs.clusters.num_prototypes, method_kwargs.clusters.kmeans.iterations "
        "(positives=view has no clusters)",
    ),
    "clusters of neighbours": (
        NNCLRSymmetric,
        {**SUPPORT, "clusters": {"warmup_epochs": 0}},
        "method_kwargs.clusters.warmup_epochs (positives=nearest_neighbor has no clusters)",
    ),
    "concentrations": (
        CONTRASTIVE,
        {**PROTOTYPES, "clusters": ALPHA},
        "method_kwargs.clusters.alpha (the loss does not read the clusters' concentrations)",
    ),
    "support of views": (
        CONTRASTIVE,
        SUPPORT,
        "method_kwargs.support_set.size, method_kwargs.support_set.exclude_own "
        "(positives=view has no support set)",
    ),
    "support of prototypes": (
        CONTRASTIVE,
        {**PROTOTYPES, "support_set": {"top_k": 3}},
        "method_kwargs.support_set.top_k (positives=prototype has no support set)",
    ),
    "weights": (
        HardNegative,
        {"beta": 0.0, "detach_weights": True},
        "method_kwargs.detach_weights (beta=0 has no weights)",
    ),
    "two ways of views": (
        CONTRASTIVE,
        {"symmetric": False},
        "method_kwargs.symmetric (read with positives=nearest_neighbor and negatives=batch)",
    ),
    "two ways of a queue": (
        NNCLRSymmetric,
        {**SUPPORT, **QUEUE, "symmetric": False},
        "method_kwargs.symmetric (read with positives=nearest_neighbor and negatives=batch)",
    ),
    "mining without mixing": (
        MoCHi,
        {"queue_size": 48, "mixing": {"num_hard": 9, "num_pair_mixes": 0, "num_query_mixes": 0}},
        "method_kwargs.mixing.num_hard (no mixtures are asked for)",
    ),
    "one layer": (
        CONTRASTIVE,
        {"proj_layers": 1, "proj_batch_norm": False},
        "method_kwargs.proj_hidden_dim, method_kwargs.proj_batch_norm "
        "(proj_layers=1 has no hidden layer)",
    ),
    "several": (
        CONTRASTIVE,
        {"detach_weights": True, "support_set": {"size": 30}},
        "method_kwargs.support_set.size (positives=view has no support set); "
        "method_kwargs.detach_weights (beta=0 has no weights)",
    ),
    "metric: mining": (
        Metric,
        {**XENT, "mining": "hard"},
        "method_kwargs.mining (nt_xent_loss_func is not of triplets, which alone are mined)",
    ),
    "metric: clusters": (
        Metric,
        {**TRIPLET, "clusters": {"num_prototypes": [3], "e_step": "bank"}},
        "method_kwargs.clusters.num_prototypes, method_kwargs.clusters.e_step "
        "(classes=instance has no clusters)",
    ),
    "metric: concentrations": (
        Metric,
        {**TRIPLET, "classes": "cluster", "clusters": {**CLUSTERS, "alpha": 5.0}},
        "method_kwargs.clusters.alpha (the loss does not read the clusters' concentrations)",
    ),
    "metric: length": (
        Metric,
        {**XENT, "normalize": False},
        "method_kwargs.normalize (nt_xent_loss_func normalises by itself)",
    ),
    "metric: weights": (
        Metric,
        {**HARD, "loss_kwargs": {"beta": 0.0, "detach_weights": True}},
        "method_kwargs.loss_kwargs.detach_weights (beta=0 has no weights)",
    ),
    "metric: one layer": (
        Metric,
        {**XENT, "proj_layers": 1},
        "method_kwargs.proj_hidden_dim (proj_layers=1 has no hidden layer)",
    ),
}
READ: dict[str, tuple[Any, dict[str, Any]]] = {
    "no mixing": (MoCHi, {**QUEUE, "mixing": {"num_pair_mixes": 0, "num_query_mixes": 0}}),
    "prototypes": (CONTRASTIVE, PROTOTYPES),
    "weights": (HardNegative, {"detach_weights": True}),
    "a queue": (HardNegative, QUEUE),
    "one way": (NNCLRSymmetric, {**SUPPORT, "symmetric": False}),
    "neighbours against a queue": (CONTRASTIVE, {**NEAR, **SUPPORT, **QUEUE}),
    "mixing": (MoCHi, {"queue_size": 48, "mixing": {"num_hard": 9, "warmup_epochs": 0}}),
    "two layers": (CONTRASTIVE, {"proj_layers": 3, "proj_batch_norm": False}),
    "metric: mining": (Metric, {**TRIPLET, "mining": "hard", "normalize": False}),
    "metric: clusters": (Metric, {**TRIPLET, "classes": "cluster", "clusters": CLUSTERS}),
    "metric: weights": (Metric, {**HARD, "loss_kwargs": {"detach_weights": True}}),
    "metric: hard negatives lift the floor": (
        Metric,
        {**HARD, "loss_kwargs": {"tau_plus": 0.3, "beta": 50.0}, "proj_output_dim": 128},
    ),
    "metric: no weights": (Metric, {**HARD, "loss_kwargs": {"beta": 0.0, "detach_weights": False}}),
    "metric: length": (Metric, {**XENT, "normalize": True}),
}
SAID: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a large support set": (
        NNCLRSymmetric,
        {"support_set": {"size": 30}},
        "method_kwargs.support_set.size=30 holds 62% of the 48 training images: ",
    ),
    "a larger one": (
        NNCLRSymmetric,
        {"support_set": {"size": 100}},
        "method_kwargs.support_set.size=100 holds 100% of the 48 training images: ",
    ),
    "late mixing": (
        MoCHi,
        {"queue_size": 48, "mixing": {**MIXES, "num_hard": 9, "warmup_epochs": 1}},
        "method_kwargs.mixing.warmup_epochs=1 of max_epochs=1: no negatives will ever be mixed",
    ),
    "a floor": (
        Debiased,
        {"temperature": 0.2},
        "method_kwargs.tau_plus=0.1 is large for temperature=0.2: ",
    ),
    "late prototypes": (
        HardNegative,
        {**PROTOTYPES, "clusters": {"num_prototypes": [3], "warmup_epochs": 1}},
        "method_kwargs.clusters.warmup_epochs=1 of max_epochs=1: the prototypes will never be used",
    ),
    "late clusters": (
        Metric,
        {**TRIPLET, "classes": "cluster", "clusters": {**CLUSTERS, "warmup_epochs": 1}},
        "method_kwargs.clusters.warmup_epochs=1 of max_epochs=1: the prototypes will never be used",
    ),
    "a floor of a loss": (
        Metric,
        {**HARD, "loss_kwargs": {"tau_plus": 0.3}, "proj_output_dim": 128},
        "method_kwargs.loss_kwargs.tau_plus=0.3 is large for temperature=0.5: ",
    ),
}


def said(caplog: pytest.LogCaptureFixture, method: Any, num_samples: int | None = None) -> str:
    """What a method says when it starts to train on so many images."""
    caplog.clear()
    if isinstance(method, Metric):
        metric.report_settings(method.cfg)
    else:
        contrastive_kwargs.report_settings(method.cfg, type(method.kwargs), num_samples)
    return "\n".join(caplog.messages)


@pytest.mark.parametrize("case", IDLE)
def test_idle_settings(build: Build, caplog: pytest.LogCaptureFixture, case: str) -> None:
    kind, kwargs, listed = IDLE[case]
    line = f"debiased: settings without effect on training: {listed}"
    assert said(caplog, build(kind, **kwargs)) == line


@pytest.mark.parametrize("case", READ)
def test_settings_that_are_read(build: Build, caplog: pytest.LogCaptureFixture, case: str) -> None:
    kind, kwargs = READ[case]
    assert said(caplog, build(kind, **kwargs)) == ""


@pytest.mark.parametrize("case", SAID)
def test_warnings(build: Build, caplog: pytest.LogCaptureFixture, case: str) -> None:
    kind, kwargs, message = SAID[case]
    (line,) = said(caplog, build(kind, **kwargs), 48).splitlines()
    assert line.startswith(message)


def test_support_sets_of_half_the_data(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    for support in ({"size": 24}, {"size": 40, "exclude_own": True}):
        assert said(caplog, build(NNCLRSymmetric, support_set=support), 48) == ""


@pytest.mark.parametrize(
    "name",
    [n for n in shipped_configs() if n.rpartition("/")[2] in (*PRESETS, "metric")],
)
def test_shipped_configs_have_none(caplog: pytest.LogCaptureFixture, name: str) -> None:
    given = compose(name)
    kind = METHODS[given["method"]].target
    kwargs = check_method_kwargs(kind.kwargs_type, given["method_kwargs"])
    cfg = OmegaConf.create({**given, "method_kwargs": kwargs.model_dump()})
    if kind is Metric:
        metric.report_settings(cfg)
    else:
        contrastive_kwargs.report_settings(cfg, kind.kwargs_type, None)
    assert caplog.messages == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "kwargs", "says"),
    [
        (CONTRASTIVE, {"temperature": 0.2, "tau_plus": 0.3, "detach_weights": True}, 2),
        (Metric, {**XENT, "mining": "hard"}, 1),
    ],
    ids=["contrastive", "metric"],
)
def test_said_by_one_process(
    build: Build,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    kwargs: dict[str, Any],
    says: int,
    first: bool,
) -> None:
    """And not before training: networks are built to be evaluated too."""
    method = build(kind, **kwargs)
    assert "tau_plus" not in caplog.text
    assert "mining" not in caplog.text
    # The host may have had something to say.
    caplog.clear()
    method.trainer = SimpleNamespace(is_global_zero=first)
    method.on_train_start()
    assert len(caplog.messages) == says * first


def test_a_support_set_is_compared_with_the_images_of_the_run(
    build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solo_ext.data.indexed.training_set", lambda *_: range(48))
    method = build(NNCLRSymmetric, support_set={"size": 30})
    method.trainer = SimpleNamespace(is_global_zero=True)
    method.on_train_start()
    assert "support_set.size=30 holds 62% of the 48 training images" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "small", "processes", "offered"),
    [
        ({}, 0, 1, 23 * 2),
        ({}, 3, 1, 23 * 5),
        ({}, 0, 2, 47 * 2),
        (PROTOTYPES, 0, 1, 23 * 2),
        ({**NEAR, **SUPPORT}, 3, 1, 23),
        ({**NEAR, **SUPPORT}, 0, 2, 47),
    ],
)
def test_more_mined_than_a_batch_offers(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kwargs: dict[str, Any],
    small: int,
    processes: int,
    offered: int,
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    enough, more = (
        build(small=small, mixing={**MIXES, "num_hard": n}, **kwargs)
        for n in (offered, offered + 1)
    )
    assert said(caplog, enough) == ""
    line = f"method_kwargs.mixing.num_hard={offered + 1}: an anchor has {offered} negatives in the"
    assert said(caplog, more).startswith(line)
    # What is never mixed needs no more.
    more.cfg.method_kwargs.mixing.warmup_epochs = 1
    assert "num_hard" not in said(caplog, more)
    assert "no negatives will ever be mixed" in said(caplog, more)


def test_a_preset_s_defaults_are_nobody_s_change(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    method = build(HardNegative, proj_layers=1, proj_hidden_dim=512)
    caplog.clear()
    method.trainer = SimpleNamespace(is_global_zero=True)
    method.on_train_start()
    assert caplog.messages == []


def test_a_queue_is_no_batch(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    mixing = {**MIXES, "num_hard": 48}
    assert said(caplog, build(**QUEUE, mixing=mixing)) == ""


def test_own_neighbours_without_indices(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """What such data cannot have is no remedy."""
    method = build(**NEAR, support_set={"size": 30})
    assert "take exclude_own: true or a smaller size (watch" in said(caplog, method, 48)
    method.cfg.data.format = "dali"
    assert said(caplog, method, 48).endswith("; take a smaller size")


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


class Inner(Section):
    a: PositiveInt = 1
    b: PositiveInt = 2


class Outer(Section):
    needed: str
    size: PositiveInt = 3
    size_of_it: PositiveInt = 4
    inner: Inner = Inner(b=5)


NOT_READ = {"size": "no set", "inner": "no inner", "needed": "of no use"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "the default": ({"size": 3, "inner": {"b": 5}}, ""),
    "of another name": ({"size_of_it": 9}, ""),
    "one": ({"size": 4}, "method_kwargs.size (no set)"),
    "in a section": ({"inner": {"b": 2}}, "method_kwargs.inner.b (no inner)"),
    "all": (
        {"inner": {"a": 7, "b": 2}, "size": 4, "size_of_it": 9},
        "method_kwargs.size (no set); method_kwargs.inner.a, method_kwargs.inner.b (no inner)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_idle_settings_that_were_changed(caplog: pytest.LogCaptureFixture, case: str) -> None:
    """In one line, by name; what must be given is nobody's change."""
    given, listed = CASES[case]
    kwargs = check_method_kwargs(Outer, {"needed": "x", **given})
    cfg = OmegaConf.create({"method": "some", "method_kwargs": kwargs.model_dump()})
    warn_of_idle_settings(cfg, Outer, NOT_READ)
    line = f"some: settings without effect on training: {listed}"
    assert caplog.messages == ([line] if listed else [])


@pytest.mark.parametrize(
    ("temperature", "tau_plus", "beta", "dim", "warns"),
    [
        (0.1, 0.1, 0.0, 128, True),
        (0.2, 0.1, 0.0, 128, True),
        (0.07, 0.01, 0.0, 128, True),
        (0.5, 0.1, 0.0, 128, False),
        (1.0, 0.1, 0.0, 128, False),
        (0.5, 0.3, 0.0, 128, True),
        (0.1, 0.0001, 0.0, 128, False),
        (0.01, 0.0, 0.0, 128, False),
        # Hard negatives lift the estimate off its floor.
        (0.2, 0.02, 0.0, 128, True),
        (0.2, 0.02, 1.0, 128, True),
        (0.2, 0.02, 5.0, 128, False),
        # So few dimensions that the usual estimate leaves the range of floats.
        (0.01, 0.1, 0.0, 1, False),
        (0.015, 0.1, 0.0, 2, False),
    ],
)
def test_floor(
    caplog: pytest.LogCaptureFixture,
    temperature: float,
    tau_plus: float,
    beta: float,
    dim: int,
    warns: bool,
) -> None:
    warn_of_the_floor("here", tau_plus, beta, temperature, dim)
    assert len(caplog.messages) == warns
    line = f"here.tau_plus={tau_plus} is large for temperature={temperature}: most anchors will sit"
    assert all(message.startswith(line) for message in caplog.messages)
    assert "watch" not in caplog.text


def test_metric_that_shows_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_the_floor("here", 0.1, 0.0, 0.2, 128, watch="share")
    assert "negatives (watch share); take tau_plus below 0.012 or" in caplog.text
