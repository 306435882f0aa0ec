"""Normalised rows and their gradients beside ``torch.nn.functional.normalize``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counting import counted
from solo_ext.kernels.normalized import SHORTEST, normalized


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [0.0, 0.5 * SHORTEST, SHORTEST, 1e-6, 1.0, 1e6])
def test_equals_torch(length: float, dtype: torch.dtype) -> None:
    given = F.normalize(torch.randn(3, 4, 5, dtype=dtype), dim=-1) * length
    given.requires_grad_()
    weights = torch.randn(3, 4, 5, dtype=dtype)
    found, expected = normalized(given), F.normalize(given, dim=-1)
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), given)[0] for x in (found, expected))
    # A length that rounds to the shortest one may count as shorter.
    if length != SHORTEST:
        scale = max(length, SHORTEST)
        torch.testing.assert_close(ours * scale, theirs * scale)


def test_gradients() -> None:
    given = rows(4, 6)
    assert torch.autograd.gradcheck(normalized, given)
    assert torch.autograd.gradgradcheck(normalized, given)


def test_under_autocast() -> None:
    """As torch's: lengths in full precision, also of narrow rows."""
    given = rows(4, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for x in (given, given.bfloat16()):
            found, expected = normalized(x), F.normalize(x, dim=-1)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert torch.autograd.grad(found.sum(), given)[0].dtype == torch.float32


def test_without_a_gradient_nothing_is_kept() -> None:
    with torch.no_grad():
        assert normalized(rows(4, 6)).grad_fn is None
    assert normalized(rows(4, 6).detach()).grad_fn is None


def test_operations() -> None:
    """Three and six, beside the sum's gradient of one."""
    given, weights = rows(4, 6), torch.randn(4, 6, dtype=torch.float64)
    work = counted(lambda: torch.autograd.grad(normalized(given), given, weights))
    assert work.launches <= 9
    assert work.waits == []
