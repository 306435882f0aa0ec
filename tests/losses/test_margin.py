"""ArcFace, CosFace and SphereFace against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import arcface_loss_func, cosface_loss_func, sphereface_loss_func

DRAWN = settings(deadline=None, max_examples=40)
ANGLES = st.lists(st.floats(0.02, math.pi - 0.02), min_size=2, max_size=5)


def arc(margin: float, monotone: bool) -> Callable[[float], float]:
    def change(angle: float) -> float:
        if monotone and angle > math.pi - margin:
            return math.cos(angle) - margin * math.sin(margin)
        return math.cos(angle + margin)

    return change


def sphere(margin: int) -> Callable[[float], float]:
    def change(angle: float) -> float:
        k = math.floor(margin * angle / math.pi)
        sign = -1 if k % 2 else 1
        return sign * math.cos(margin * angle) - 2 * k

    return change


def expected(
    angles: list[float], target: int, change: Callable[[float], float], scale: float
) -> float:
    """Cross-entropy of one row, relative to the largest logit."""
    logits = [scale * math.cos(angle) for angle in angles]
    logits[target] = scale * change(angles[target])
    largest = max(logits)
    return largest + math.log(sum(math.exp(v - largest) for v in logits)) - logits[target]


def row(angles: list[float]) -> Tensor:
    return torch.tensor([angles], dtype=torch.float64).cos().requires_grad_()


@DRAWN
@given(
    angles=ANGLES,
    scale=st.floats(0.5, 100),
    margin=st.floats(0, 3.1),
    monotone=st.booleans(),
    data=st.data(),
)
def test_arcface_equals_the_formula(
    angles: list[float], scale: float, margin: float, monotone: bool, data: st.DataObject
) -> None:
    target = data.draw(st.integers(0, len(angles) - 1))
    loss = arcface_loss_func(row(angles), torch.tensor([target]), scale, margin, monotone)
    known = expected(angles, target, arc(margin, monotone), scale)
    assert loss.item() == pytest.approx(known, rel=1e-9, abs=1e-10)


@DRAWN
@given(angles=ANGLES, scale=st.floats(0.5, 100), margin=st.floats(0, 2))
def test_cosface_equals_the_formula(angles: list[float], scale: float, margin: float) -> None:
    loss = cosface_loss_func(row(angles), torch.tensor([1]), scale, margin)
    known = expected(angles, 1, lambda angle: math.cos(angle) - margin, scale)
    assert loss.item() == pytest.approx(known, rel=1e-9, abs=1e-10)


@DRAWN
@given(
    angles=ANGLES,
    scale=st.floats(0.5, 5),
    margin=st.integers(1, 6),
    norm=st.none() | st.floats(0, 9),
    share=st.just(0.0) | st.floats(0, 1000),
)
def test_sphereface_equals_the_formula(
    angles: list[float], scale: float, margin: int, norm: float | None, share: float
) -> None:
    norms = None if norm is None else torch.tensor([norm], dtype=torch.float64)
    loss = sphereface_loss_func(row(angles), torch.tensor([1]), scale, margin, norms, share)

    def annealed(angle: float) -> float:
        return (share * math.cos(angle) + sphere(margin)(angle)) / (1 + share)

    known = expected(angles, 1, annealed, scale * (1 if norm is None else norm))
    assert loss.item() == pytest.approx(known, rel=1e-8, abs=1e-10)


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "arcface": lambda c, y: arcface_loss_func(c, y, 8.0),
        "arcface plain": lambda c, y: arcface_loss_func(c, y, 8.0, 1.0, False),
        "cosface": lambda c, y: cosface_loss_func(c, y, 8.0),
        "sphereface": lambda c, y: sphereface_loss_func(c, y, 2.0),
        "sphereface 3": lambda c, y: sphereface_loss_func(
            c, y, 2.0, 3, torch.arange(1.0, len(c) + 1, dtype=c.dtype)
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.3, 0.5, 1.5])
def test_monotone_arcface_never_falls_as_the_angle_grows(margin: float, dtype: torch.dtype) -> None:
    """Also across pi - margin and out to where rounding may put a cosine."""
    own = torch.linspace(1 + 1e-6, -1 - 1e-6, 2001, dtype=dtype).requires_grad_()
    target = torch.zeros(2001).long()
    rows = torch.stack((own, torch.zeros_like(own)), dim=1)
    (gradient,) = torch.autograd.grad(arcface_loss_func(rows, target, 4.0, margin), own)
    assert gradient.isfinite().all()
    assert (gradient < 0).all()
    each = [arcface_loss_func(r[None], target[:1], 4.0, margin) for r in rows.detach()[::10]]
    assert (torch.stack(each).diff() > 0).all()
    plain = [
        arcface_loss_func(r[None], target[:1], 4.0, margin, False) for r in rows.detach()[::10]
    ]
    assert (torch.stack(plain).diff() < 0).any()


@pytest.mark.parametrize("margin", [1, 2, 3, 4, 5])
def test_sphereface_never_falls_as_the_angle_grows(margin: int) -> None:
    """Its slope is 0 at the angles where k changes, and nowhere positive, not even at pi."""
    own = torch.linspace(1 + 1e-6, -1 - 1e-6, 2001).requires_grad_()
    rows, target = torch.stack((own, torch.zeros_like(own)), dim=1), torch.zeros(2001).long()
    (gradient,) = torch.autograd.grad(sphereface_loss_func(rows, target, 1.0, margin), own)
    assert gradient.isfinite().all()
    assert (gradient <= 1e-6).all()
    opposite = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    loss = sphereface_loss_func(opposite, target[:1], 1.0, margin)
    assert loss.item() == pytest.approx(math.log1p(math.exp(2 * margin - 1)), rel=1e-5)
    assert torch.autograd.grad(loss, opposite)[0][0, 0] < 0


@pytest.mark.parametrize("cosine", [1.0, 1.0000001, -1.0, -1.0000001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", losses())
def test_poles_are_finite(name: str, dtype: torch.dtype, cosine: float) -> None:
    rows = torch.tensor([[cosine, 0.2, cosine]], dtype=dtype, requires_grad=True)
    loss = losses()[name](rows, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(loss, rows)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 0] != 0


def test_arcface_at_the_poles_is_the_formula() -> None:
    rows = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    loss = arcface_loss_func(rows, torch.tensor([0]), 1.0, 0.5)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-math.cos(0.5))))
    loss = arcface_loss_func(-rows, torch.tensor([0]), 1.0, 0.5, monotone=False)
    assert loss.item() == pytest.approx(math.log1p(math.exp(math.cos(0.5))))
    loss = arcface_loss_func(-rows, torch.tensor([0]), 1.0, 0.5)
    assert loss.item() == pytest.approx(math.log1p(math.exp(1 + 0.5 * math.sin(0.5))))


COSINE, TARGET = torch.zeros(3, 2), torch.zeros(3).long()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [arcface_loss_func, cosface_loss_func, sphereface_loss_func])
def test_half_cosines_are_computed_in_single_precision(loss: Any, half: torch.dtype) -> None:
    cosine = torch.linspace(-0.9, 0.9, 6).view(3, 2).to(half)
    with torch.autocast("cpu", dtype=half):
        found = loss(cosine, TARGET)
    assert torch.equal(found, loss(cosine.float(), TARGET))


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (arcface_loss_func, {"cosine": COSINE[0]}, r"\(N, C\) and target \(N,\)"),
        (cosface_loss_func, {"target": TARGET[:2]}, r"\(N, C\) and target \(N,\)"),
        (sphereface_loss_func, {"target": TARGET[:, None]}, r"\(N, C\) and target \(N,\)"),
        (sphereface_loss_func, {"feature_norm": torch.ones(3, 1)}, r"feature_norm must be \(3,\)"),
        (arcface_loss_func, {"scale": 0.0}, "scale=0.0: must be above 0"),
        (cosface_loss_func, {"scale": math.nan}, "scale=nan"),
        (arcface_loss_func, {"margin": 28.6}, r"margin=28.6: must lie in \[0, pi\), in radians"),
        (arcface_loss_func, {"margin": math.nan}, "margin=nan"),
        (cosface_loss_func, {"margin": -0.1}, "margin=-0.1: must be at least 0"),
        (sphereface_loss_func, {"margin": 0}, "margin=0: must be a whole number"),
        (sphereface_loss_func, {"annealing": -1.0}, "annealing=-1.0: must be at least 0"),
        (sphereface_loss_func, {"margin": 1.35}, "margin=1.35: must be a whole number"),
    ],
)
def test_refuses(loss: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(**{"cosine": COSINE, "target": TARGET, **changes})
