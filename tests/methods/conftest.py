"""Contrastive and metric methods of a few features, their settings and their log."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import METRICS
from solo_ext.losses.mochi import draw_mixes
from solo_ext.methods import load_all, negatives
from tests.conftest import DISTILLATION
from tests.methods.contrastive_ranks import CONTRASTIVE, built

MakeConfig = Callable[..., dict[str, Any]]
# Tests look methods up by name.
load_all()


@pytest.fixture(scope="session")
def build(make_config: MakeConfig) -> Callable[..., Any]:
    """``build(kind, small, data, dali, **method_kwargs)``: of 8 dimensions, after an E-step."""
    cfg = prepare(make_config("debiased")).cfg

    def make(
        kind: Any = CONTRASTIVE,
        *,
        small: int = 0,
        data: dict[str, Any] | None = None,
        dali: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        own = copy.deepcopy(cfg)
        own.dali = dali
        own.data.update({"num_small_crops": small, **(data or {})})
        return built(own, kind, kwargs)

    return make


@pytest.fixture(scope="session")
def make_method(make_config: MakeConfig, make_distilled: MakeConfig) -> Callable[..., Any]:
    """``make(name, augmentations=None, **method_kwargs)``: a method, with a teacher or without."""

    def make(name: str, augmentations: Any = None, **kwargs: Any) -> Any:
        of = make_distilled if name in DISTILLATION else make_config
        changes = {} if augmentations is None else {"augmentations": augmentations}
        prepared = prepare(of(name, method_kwargs=kwargs, **changes))
        torch.manual_seed(0)
        return prepared.method(prepared.cfg)

    return make


@pytest.fixture
def train(make_config: MakeConfig, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """``train(name, *callbacks, section={...})``: a tiny run; what it logged, last values."""

    def run(name: str, *callbacks: Callback, **changes: Any) -> dict[str, float]:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        prepared = prepare(make_config(name, **changes))
        pretrain(prepared, run_dir=folder, callbacks=callbacks, show_progress=False)
        logged: dict[str, float] = {}
        for line in (folder / METRICS).read_text().splitlines():
            logged |= json.loads(line)
        return logged

    return run


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All draws of mixtures, in order."""
    seen: list[Any] = []

    def note(*args: Any) -> Any:
        seen.append(draw_mixes(*args))
        return seen[-1]

    monkeypatch.setattr(negatives, "draw_mixes", note)
    return seen
