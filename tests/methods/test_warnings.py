"""What methods say at the start of training of settings that may surprise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from solo_ext.config.compose import compose, shipped_configs
from solo_ext.methods import METHODS, Debiased, HardNegative, MoCHi, NNCLRSymmetric
from solo_ext.methods.negatives import DrawnMixing
from solo_ext.methods.registry import fill_method_kwargs, typed_kwargs, warn_of_clamping

Build = Callable[..., Any]
MIXES = {"num_pair_mixes": 4, "warmup_epochs": 1}
SAID: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a large support set": (
        NNCLRSymmetric,
        {"support_set": {"size": 30}},
        "support_set.size=30 of 48 training images: ",
    ),
    "half of the images": (NNCLRSymmetric, {"support_set": {"size": 24}}, ""),
    "without the own image": (
        NNCLRSymmetric,
        {"support_set": {"size": 40, "exclude_own": True}},
        "",
    ),
    "late mixing": (
        MoCHi,
        {"queue_size": 48, "mixing": MIXES},
        "mixing.warmup_epochs=1 of max_epochs=1: no negatives will ever be mixed",
    ),
    "no mixing": (
        MoCHi,
        {"queue_size": 48, "mixing": {"num_pair_mixes": 0, "num_query_mixes": 0}},
        "",
    ),
    "clamping": (Debiased, {"temperature": 0.2}, "tau_plus=0.1 is large for temperature=0.2: "),
    "late prototypes": (
        HardNegative,
        {"positives": "prototype", "clusters": {"num_prototypes": [3], "warmup_epochs": 1}},
        "clusters.warmup_epochs=1 of max_epochs=1: the prototypes will never be used",
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", SAID)
def test_warnings_of_the_first_process(
    build: Build,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    first: bool,
) -> None:
    kind, kwargs, message = SAID[case]
    monkeypatch.setattr("solo_ext.data.indexed.training_set", lambda *_: range(48))
    monkeypatch.setattr("solo_ext.methods.e_step.EStep.start", lambda *_: None)
    method = build(kind, **kwargs)
    # The host may have had something to say.
    caplog.clear()
    method.trainer = SimpleNamespace(
        is_global_zero=first, global_step=0, estimated_stepping_batches=1
    )
    method.on_train_start()
    assert len(caplog.messages) == bool(message and first)
    assert all(line.startswith(f"method_kwargs.{message}") for line in caplog.messages)


@pytest.mark.parametrize(
    ("temperature", "tau_plus", "beta", "dim", "warns"),
    [
        (0.2, 0.1, 0.0, 128, True),
        (0.07, 0.01, 0.0, 128, True),
        (0.5, 0.1, 0.0, 128, False),
        (0.5, 0.3, 0.0, 128, True),
        (0.01, 0.0, 0.0, 128, False),
        # Hard negatives lift the estimate off its floor.
        (0.2, 0.02, 1.0, 128, True),
        (0.2, 0.02, 5.0, 128, False),
        # So few dimensions that the usual estimate leaves the range of floats.
        (0.01, 0.1, 0.0, 1, False),
    ],
)
def test_clamping(
    caplog: pytest.LogCaptureFixture,
    temperature: float,
    tau_plus: float,
    beta: float,
    dim: int,
    warns: bool,
) -> None:
    warn_of_clamping(tau_plus, beta, temperature, dim)
    assert len(caplog.messages) == warns


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in shipped_configs()
        if name.rpartition("/")[2] in ("debiased", "hard_negative", "mochi", "nnclr_symmetric")
    ],
)
def test_shipped_configs_have_none(caplog: pytest.LogCaptureFixture, name: str) -> None:
    cfg = OmegaConf.create(compose(name))
    kwargs_type = METHODS[cfg.method].target.kwargs_type
    kwargs = typed_kwargs(fill_method_kwargs(cfg, kwargs_type).method_kwargs, kwargs_type)
    warn_of_clamping(kwargs.tau_plus, kwargs.beta, kwargs.temperature, kwargs.proj_output_dim)
    DrawnMixing(kwargs.mixing).warn_of_late_start(cfg)
    assert caplog.messages == []
