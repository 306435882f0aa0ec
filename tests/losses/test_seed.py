"""SEED against the plain form, its limits and edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import seed_loss_func, seed_terms
from solo_ext.losses.seed import plain_seed

N, K, D = 5, 23, 4


def unit(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, D, generator=generator, dtype=torch.float64), dim=1)


def make(size: int = K) -> tuple[Tensor, Tensor, Tensor]:
    return (2 * unit(N, 0)).requires_grad_(), 3 * unit(N, 1), unit(size, 2)


def plain(
    student: Tensor, teacher: Tensor, queue: Tensor, student_t: float, teacher_t: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, entropy and own target, from (N, 1 + K) matrices."""
    student, teacher = (F.normalize(x, dim=1) for x in (student, teacher))
    similar = torch.cat(((teacher * teacher).sum(1, keepdim=True), teacher @ queue.T), 1)
    probs = (similar / teacher_t).softmax(1)
    loss = plain_seed(student, teacher, queue, student_t, teacher_t)
    return loss, torch.special.entr(probs).sum(1).mean(), probs[:, 0].mean()


@pytest.mark.parametrize("temperatures", [(0.2, 0.01), (0.2, 1e-4), (0.07, 0.07), (0.2, 1.0)])
@pytest.mark.parametrize("size", [0, 1, K, 400])
def test_equals_the_plain_form(size: int, temperatures: tuple[float, float]) -> None:
    given = make(size)
    found, expected = seed_terms(*given, *temperatures), plain(*given, *temperatures)
    torch.testing.assert_close(tuple(found), expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(seed_loss_func(*given, *temperatures), found.loss)
    gradients = [torch.autograd.grad(3 * x, given[0])[0] for x in (found.loss, expected[0])]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


def test_half_precision_products_are_near() -> None:
    student, teacher, queue = (x.detach().float() for x in make(400))
    student.requires_grad_()
    terms = [seed_terms(student, teacher, queue, compute_dtype=d) for d in (None, torch.bfloat16)]
    torch.testing.assert_close(terms[1].loss, terms[0].loss, rtol=1e-2, atol=0)
    # The teacher's similarities are not rounded.
    assert torch.equal(terms[1].own, terms[0].own)
    own, near = (torch.autograd.grad(t.loss, student)[0] for t in terms)
    assert 0 < float((near - own).norm() / own.norm()) < 0.05


def test_only_the_student_learns() -> None:
    student, teacher, queue = (x.detach().requires_grad_() for x in make())
    terms = seed_terms(student, teacher, queue)
    assert not terms.entropy.requires_grad
    assert not terms.own.requires_grad
    terms.loss.backward()
    assert student.grad is not None
    assert teacher.grad is queue.grad is None
    with torch.no_grad():
        assert torch.equal(seed_loss_func(student, teacher, queue), terms.loss)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, torch.ones(4, D), r"must both be \(N, D\)"),
        (2, torch.ones(K, D + 1), r"must be \(K, 4\)"),
        (3, 0.0, r"student_temperature=0.0: must be above 0"),
        (4, -1.0, r"teacher_temperature=-1.0: must be above 0"),
    ],
)
def test_refuses(index: int, change: Any, message: str) -> None:
    arguments: list[Any] = [*make(), 0.2, 0.01]
    arguments[index] = change
    with pytest.raises(ValueError, match=message):
        seed_loss_func(*arguments)
