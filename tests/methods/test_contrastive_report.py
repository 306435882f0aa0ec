"""What the contrastive methods say of settings that do not do what a user may think."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core import distributed
from solo_ext.methods import METHODS, HardNegative, MoCHi, NNCLRSymmetric
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs, report_settings

CONTRASTIVE = Preset(ContrastiveKwargs)
Build = Callable[..., Any]
PRESETS = ("debiased", "hard_negative", "mochi", "nnclr_symmetric")
NEAR, QUEUE = {"positives": "nearest_neighbor"}, {"negatives": "queue", "queue_size": 48}
PROTOTYPES = {"positives": "prototype", "clusters": {"num_prototypes": [3], "warmup_epochs": 0}}
SUPPORT = {"support_set": {"size": 30, "exclude_own": True}}
MIXES = {"num_pair_mixes": 4, "warmup_epochs": 0}
ALPHA = {"num_prototypes": [3], "warmup_epochs": 0, "alpha": 5.0}
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
}


def said(caplog: pytest.LogCaptureFixture, method: Any, num_samples: int | None = None) -> str:
    caplog.clear()
    report_settings(method.cfg, type(method.kwargs), num_samples)
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


@pytest.mark.parametrize("name", [n for n in shipped_configs() if n.rpartition("/")[2] in PRESETS])
def test_shipped_configs_have_none(caplog: pytest.LogCaptureFixture, name: str) -> None:
    given = compose(name)
    kind = METHODS[given["method"]].target
    kwargs = check_method_kwargs(kind.kwargs_type, given["method_kwargs"])
    cfg = OmegaConf.create({**given, "method_kwargs": kwargs})
    report_settings(cfg, kind.kwargs_type, None)
    assert caplog.messages == []


@pytest.mark.parametrize("first", [True, False])
def test_said_by_one_process(build: Build, caplog: pytest.LogCaptureFixture, first: bool) -> None:
    """And not before training: networks are built to be evaluated too."""
    method = build(temperature=0.2, tau_plus=0.3, detach_weights=True)
    assert "tau_plus" not in caplog.text
    # The host may have had something to say.
    caplog.clear()
    method.trainer = SimpleNamespace(is_global_zero=first)
    method.on_train_start()
    assert len(caplog.messages) == 2 * first


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
