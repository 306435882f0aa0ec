"""Forms of operations, launches of a GPU, and what the tests of several kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counting import counted
from solo_ext.kernels import (
    dispatch,
    in_batch,
    mixed_logsumexp,
    nearest_rows,
    prototype_contrast,
    sinkhorn,
    tables,
)

Launches = Callable[[Callable[[], Any]], int]
Force = Callable[[dispatch.Form], None]
Tiled = Callable[[int | None], None]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same at every call and for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random rows of length 1."""
    return F.normalize(normal(*shape, seed=seed, dtype=dtype), dim=-1)


def slope(lse: Tensor, query: Tensor) -> Tensor:
    """Gradient of a sum in which every log-sum-exp has a weight of its own."""
    each = torch.arange(1.0, lse.numel() + 1, dtype=lse.dtype, device=lse.device)
    return torch.autograd.grad((lse * each.view_as(lse)).sum(), query)[0]


@pytest.fixture(scope="session")
def launches() -> Launches:
    """``launches(f)``: how many operations of ``f()`` work on tensors."""

    return lambda run: counted(run).launches


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """``force(form)``: operations run in this form from now on, also where it is not offered."""

    def apply(form: dispatch.Form) -> None:
        monkeypatch.setattr(dispatch, "has_fused", lambda rows: form == "fused")
        monkeypatch.setattr(dispatch, "_form", lambda *_: form)

    return apply


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch, force: Force) -> Tiled:
    """``tiled(n)``: operations run in tiles of n rows from now on; ``None`` changes nothing."""

    def apply(rows: int | None) -> None:
        if rows is not None:
            force("tiles")
            split = in_batch, mixed_logsumexp, nearest_rows, prototype_contrast, sinkhorn, tables
            for module in split:
                monkeypatch.setattr(module, "tile_rows", lambda *_, **__: rows)

    return apply


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a Triton kernel runs: under its interpreter, or on a GPU."""
    triton = pytest.importorskip("triton", reason="this build of torch comes without Triton")
    if request.param == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 is not set: kernels run on the GPU")
    return torch.device(request.param)
