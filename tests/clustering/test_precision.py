"""The precision of products is set for the steps alone and given back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from solo_ext.clustering import k_means, kmeans, lloyd
from solo_ext.core.precision import matmul_precision

if not hasattr(torch.backends.mkldnn, "matmul"):
    pytest.skip("torch before 2.9 has one setting for all devices", allow_module_level=True)

CPU, CUDA = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
Setting = tuple[str, str]


def setting() -> Setting:
    """What is set, on the CPU and on CUDA."""
    return CPU.fp32_precision, CUDA.fp32_precision


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    before = setting()
    yield
    CPU.fp32_precision, CUDA.fp32_precision = before


@pytest.mark.parametrize(
    ("name", "expected"),
    [("highest", ("ieee", "ieee")), ("high", ("tf32", "tf32")), ("medium", ("bf16", "tf32"))],
)
@pytest.mark.parametrize("before", [("none", "none"), ("ieee", "tf32"), ("bf16", "ieee")])
def test_sets_and_restores(name: str, expected: Setting, before: Setting) -> None:
    CPU.fp32_precision, CUDA.fp32_precision = before
    with matmul_precision(name):  # type: ignore[arg-type]
        assert setting() == expected
    assert setting() == before
    with pytest.raises(RuntimeError, match="broken"), matmul_precision(name):  # type: ignore[arg-type]
        raise RuntimeError("broken")
    assert setting() == before


def test_last_assignment_is_at_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Setting]] = {"steps": [], "last": []}
    search, assign = lloyd.Nearest.__call__, k_means.assign

    def in_steps(*arguments: Any) -> Any:
        seen["steps"].append(setting())
        return search(*arguments)

    def at_last(*arguments: Any) -> Any:
        seen["last"].append(setting())
        return assign(*arguments)

    monkeypatch.setattr(lloyd.Nearest, "__call__", in_steps)
    monkeypatch.setattr(k_means, "assign", at_last)
    before = setting()
    kmeans(torch.rand(50, 3), 4, iterations=2, precision="medium", backend="torch")
    assert seen == {"steps": [("bf16", "tf32")] * 2, "last": [("ieee", "ieee")]}
    assert setting() == before


def test_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(lloyd, "search", broken)
    before = setting()
    with pytest.raises(RuntimeError, match="broken"):
        kmeans(torch.rand(50, 3), 4, backend="torch")
    assert setting() == before


def test_works_where_only_the_old_setting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = setting()
    monkeypatch.setattr(torch.backends, "mkldnn", object())
    calls: list[str] = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    with matmul_precision("medium"):
        assert calls == ["medium"]
    assert calls == ["medium", "high"]
    monkeypatch.undo()
    assert setting() == before
