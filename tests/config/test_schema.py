"""Values that depend on the machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from solo_ext.config.schema import Images
from solo_ext.core.errors import ConfigError
from tests.data.making import section


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (64, 8)])
def test_automatic_workers(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    """As many as the process may use, and not more than feed a GPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert Images(dataset="custom").num_workers == workers
    assert section("images", num_workers="auto").num_workers == workers
    assert section("images", num_workers=3).num_workers == 3


@pytest.mark.parametrize("wrong", ["many", -1, 2.5])
def test_wrong_workers(make_config: Any, wrong: Any) -> None:
    from solo_ext.config.check import check_run

    with pytest.raises(ConfigError, match="num_workers"):
        check_run(make_config("simclr", data={"num_workers": wrong}))
