"""Contrastive and metric methods of a few features, their settings and their log."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import METRICS
from solo_ext.methods import load_all
from tests.methods.contrastive_run import CONTRASTIVE, DIM, built

MakeConfig = Callable[..., dict[str, Any]]
# Tests look methods up by name.
load_all()


@pytest.fixture(scope="session")
def build(make_config: MakeConfig) -> Callable[..., Any]:
    """``build(kind, small=0, data={}, **method_kwargs)``: of 8 dimensions, after an E-step."""
    cfg = prepare(make_config("debiased")).cfg

    def make(
        kind: Any = CONTRASTIVE,
        *,
        small: int = 0,
        data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        own = copy.deepcopy(cfg)
        own.data.update({"num_small_crops": small, **(data or {})})
        return built(own, kind, kwargs)

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


class _OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to make a tensor anywhere else: a copy between devices waits for both."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            assert not isinstance(tensor, Tensor) or tensor.device == self.device, func
        return out


@pytest.fixture
def on_meta() -> TorchDispatchMode:
    """Context in which every new tensor must be on the device ``meta``."""
    return _OnDevice(torch.device("meta"))


@pytest.fixture
def features() -> Callable[..., list[Tensor]]:
    """``features(count, rows=4)``: embeddings with gradient, views of the same images alike."""

    def make(count: int, rows: int = 4) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(rows, DIM, generator=generator)
        noise = torch.randn(count, rows, DIM, generator=generator)
        return [(images + x).requires_grad_() for x in noise]

    return make


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], dict[str, Tensor]]:
    """``log(method)``: what the method will log, without a trainer."""

    def listen(method: Any) -> dict[str, Tensor]:
        logged: dict[str, Tensor] = {}
        monkeypatch.setattr(method, "log_dict", lambda metrics, **_: logged.update(metrics))
        return logged

    return listen


@pytest.fixture
def gradients() -> Callable[[Tensor, Sequence[Tensor]], list[Tensor]]:
    """``gradients(loss, inputs)``: of a loss, the graph kept."""

    def compute(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(loss, inputs, retain_graph=True))

    return compute
