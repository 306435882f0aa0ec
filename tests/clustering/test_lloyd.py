"""The search for the nearest mean, by groups of scores and while means move; its precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from solo_ext.clustering import k_means, kmeans, lloyd
from solo_ext.clustering.lloyd import Nearest, assign
from solo_ext.core.precision import matmul_precision


@pytest.mark.parametrize("count", [1, 31, 64, 65, 96, 97, 250, 1000])
def test_nearest_and_of_equal_ones_the_first(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    rows = torch.randint(-3, 4, (700, 4), generator=draw).double()
    # Few places for many means: most rows have several as near, of the same bits.
    means = torch.randint(-3, 4, (count, 4), generator=draw).double()
    means -= means.mean(0).round()
    apart = (rows[:, None] - means).square().sum(2)
    found = assign(rows, means)
    near = apart.gather(1, found[:, None])[:, 0]
    torch.testing.assert_close(near, apart.amin(1), rtol=0, atol=1e-9)
    equal = (means[:, None] == means[found]).all(2).T
    assert torch.equal(found, equal.int().argmax(1))


@pytest.mark.parametrize("moving", [0, 1, 20, 70, 99, 200])
@pytest.mark.parametrize("grid", [False, True])
def test_equals_a_search_from_scratch(moving: int, grid: bool) -> None:
    draw = torch.Generator().manual_seed(moving)
    x = torch.randn(900, 5, generator=draw, dtype=torch.float64)
    means = torch.randn(200, 5, generator=draw, dtype=torch.float64) + 0.5
    if grid:
        # Many rows as near to several means; the means balance, so that the sums are exact.
        x, means = x.round(), means[:100].round()
        means = torch.cat([means, -means])
    follow = Nearest(x)
    for _ in range(5):
        assert torch.equal(follow(means), assign(x, means))
        means = means.clone()
        chosen = torch.randperm(200, generator=draw)[:moving]
        means[chosen] = means[chosen].flip(0)
        if not grid:
            means[chosen] += 0.3 * torch.randn(moving, 5, generator=draw, dtype=torch.float64)


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
    search, assign = lloyd.Nearest.__call__, lloyd.assign

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
