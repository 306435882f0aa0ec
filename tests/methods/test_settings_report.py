"""What is said of settings, whatever the method."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.types import PositiveInt, method_kwargs
from solo_ext.methods.settings_report import warn_of_idle_settings, warn_of_the_floor


@method_kwargs
class Inner:
    a: PositiveInt = 1
    b: PositiveInt = 2


@method_kwargs
class Outer:
    needed: str
    size: PositiveInt = 3
    size_of_it: PositiveInt = 4
    inner: Inner = Inner(b=5)


IDLE = {"size": "no set", "inner": "no inner", "needed": "of no use"}
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
    cfg = OmegaConf.create({"method": "some", "method_kwargs": kwargs})
    warn_of_idle_settings(cfg, Outer, IDLE)
    line = f"some: settings without effect on training: {listed}"
    assert caplog.messages == ([line] if listed else [])


@pytest.mark.parametrize(("beta", "warns"), [(0.0, True), (1.0, True), (5.0, False)])
def test_hard_negatives_lift_the_estimate_off_its_floor(
    caplog: pytest.LogCaptureFixture, beta: float, warns: bool
) -> None:
    warn_of_the_floor("here", 0.02, beta, 0.2, 128)
    assert len(caplog.messages) == warns
    assert all(m.startswith("here.tau_plus=0.02 is large") for m in caplog.messages)
    assert "watch" not in caplog.text


def test_metric_that_shows_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_the_floor("here", 0.1, 0.0, 0.2, 128, watch="share")
    assert "negatives (watch share); take tau_plus below 0.012 or" in caplog.text
