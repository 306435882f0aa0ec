"""ProtoCPC against Algorithm 1: from logits by a loop, from features by the plain form."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels import prototype_contrast as kernel
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import assign
from solo_ext.losses.protocpc import ProtoCPCTerms, protocpc_loss_func, protocpc_step
from solo_ext.memory import sinkhorn

N, K, D = 9, 21, 4


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, N, K, generator=generator, dtype=torch.float64).tanh()
    prior = torch.rand(K, generator=generator, dtype=torch.float64) + 0.1
    return logits, (teacher / 0.3).softmax(1), K * prior / prior.sum()


def test_an_unused_prototype_is_still_pushed_away() -> None:
    logits, probs, prior = inputs()
    prior[2] = 0
    logits.requires_grad_()
    loss = protocpc_loss_func(logits, probs, prior)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    prior[2] = 1e-8
    assert torch.equal(loss, protocpc_loss_func(logits, probs, prior))


def test_refuses() -> None:
    logits, probs, prior = inputs()
    with pytest.raises(ValueError, match=r"must both be \(N, K\), got \(9, 21\) and \(9, 20\)"):
        protocpc_loss_func(logits, probs[:, 1:], prior)
    with pytest.raises(ValueError, match=r"prior must be \(21,\), one per prototype, got \(20,\)"):
        protocpc_loss_func(logits, probs, prior[1:])
    with pytest.raises(ValueError, match=r"temperature=0: must be above 0"):
        protocpc_loss_func(logits, probs, prior, 0)


class Given(NamedTuple):
    student: Tensor
    teacher: Tensor
    prototypes: Tensor
    prior: Tensor


def make(views: int = 1, assignments: int = 1, dim: int = D, batch: int = N) -> Given:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    prior = draw(K).abs() + 0.1
    return Given(
        (2 * draw(views, batch, D)).requires_grad_(),
        3 * draw(assignments, batch, dim),
        F.normalize(draw(K, D), dim=1).requires_grad_(),
        K * prior / prior.sum(),
    )


def old_prototypes(dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(K, dim, generator=generator, dtype=torch.float64), dim=1)


def plain(
    given: Given,
    teacher_prototypes: Tensor | None = None,
    targets: Tensor | None = None,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
    assignment: str = "sinkhorn",
    iterations: int = 3,
    prior_momentum: float = 0.9,
    prior_order: str = "before_loss",
    loss: str = "protocpc",
) -> tuple[Tensor, Tensor]:
    """Loss and prior, from (N, K) matrices."""
    rows = given.prototypes.detach() if teacher_prototypes is None else teacher_prototypes
    scores = [F.normalize(t, dim=1).detach() @ rows.T for t in given.teacher]
    if assignment == "softmax":
        probs = [(s / teacher_temperature).softmax(1) for s in scores]
    else:
        probs = [sinkhorn(s, teacher_temperature, iterations) for s in scores]
    mean = torch.cat(probs).mean(0)
    moved = prior_momentum * given.prior + (1 - prior_momentum) * K * mean
    used = torch.ones(K) if loss == "ce" else moved if prior_order == "before_loss" else given.prior
    total, weight = torch.zeros(()), 0.0
    for v, student in enumerate(given.student):
        logits = F.normalize(student, dim=1) @ given.prototypes.T
        for u, own in enumerate(probs):
            w = 1.0 if targets is None else float(targets[v, u])
            total = total + w * protocpc_loss_func(logits, own, used, student_temperature)
            weight += w
    return total / weight, moved


def compare(given: Given, **options: Any) -> ProtoCPCTerms:
    found = protocpc_step(*given, **options)
    expected, prior = plain(given, **options)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.align + found.unif, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.prior, prior, rtol=1e-10, atol=1e-10)
    inputs = given.student, given.prototypes
    gradients = torch.autograd.grad(3 * found.loss, inputs)
    wanted = torch.autograd.grad(3 * expected, inputs)
    assert all(g.abs().max() > 1e-6 for g in wanted)
    for gradient, own in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-9, atol=1e-10)
    return found


@pytest.mark.parametrize("loss", ["protocpc", "ce"])
@pytest.mark.parametrize("order", ["before_loss", "after_loss"])
@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
@pytest.mark.parametrize("temperatures", [(0.1, 0.04), (0.5, 0.01), (0.01, 0.025), (0.02, 1e-3)])
@pytest.mark.parametrize("dim", [None, D, 6])
def test_equals_the_plain_form(
    loss: str, order: str, assignment: str, temperatures: tuple[float, float], dim: int | None
) -> None:
    """All options; student temperatures above and below what needs no shift, teacher's too."""
    compare(
        make(dim=dim or D),
        teacher_prototypes=None if dim is None else old_prototypes(dim),
        student_temperature=temperatures[0],
        teacher_temperature=temperatures[1],
        assignment=assignment,
        prior_order=order,
        loss=loss,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("views", "assignments"), [(4, 2), (2, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("temperature", [0.1, 0.01])
def test_views_are_averaged(
    views: int, assignments: int, weighted: bool, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    targets = torch.rand(views, assignments, generator=generator) if weighted else None
    if targets is not None and views > 1:
        targets[0] = 0
    compare(make(views, assignments), targets=targets, student_temperature=temperature)


@pytest.mark.parametrize("tiles", [(1, 1), (4, 8), (9, 5), (64, 64)])
@pytest.mark.parametrize("temperature", [0.1, 0.01])
def test_tiles_do_not_matter(
    tiles: tuple[int, int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make(2, 1)
    student, scores = F.normalize(given.student, dim=2), old_prototypes(K)[:N]
    found = assign(lambda r, c: scores[r, c] / 0.04, (N, K), scores, 3)
    weights = torch.tensor([[0.3], [0.7]]).double()

    def run() -> tuple[Tensor, ...]:
        constants = [found], weights, given.prior, 1 / temperature
        terms = prototype_contrast(student, given.prototypes, *constants)
        inputs = given.student, given.prototypes
        return *terms, *torch.autograd.grad(terms[0], inputs, retain_graph=True)

    expected = run()
    monkeypatch.setattr(dispatch, "_form", lambda *_: "tiles")
    # Blocks of samples may take a larger share of the memory than those of prototypes.
    monkeypatch.setattr(kernel, "tile_rows", lambda *_, share=1: tiles[0 if share > 1 else 1])
    torch.testing.assert_close(run(), expected)


def test_nothing_goes_back_to_the_teacher() -> None:
    given = make()
    teacher = given.teacher.requires_grad_()
    prior = given.prior.requires_grad_()
    held = given.prototypes
    shared = protocpc_step(given.student, teacher, held, prior, teacher_prototypes=held)
    copied = protocpc_step(given.student, teacher, held, prior, teacher_prototypes=held.detach())
    default = protocpc_step(given.student, teacher, held, prior)
    losses = [terms.loss for terms in (shared, copied, default)]
    gradients = [torch.autograd.grad(x, held, retain_graph=True)[0] for x in losses]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[1], rtol=0, atol=0)
    shared.loss.backward()
    assert teacher.grad is prior.grad is None
    assert not any(x.requires_grad for x in (shared.align, shared.unif, shared.prior))


def test_only_what_learns_gets_a_gradient() -> None:
    given = make()
    for student, prototypes in ((True, False), (False, True)):
        x, w = (
            t.detach().requires_grad_(n) for t, n in ((given[0], student), (given[2], prototypes))
        )
        terms = protocpc_step(x, given.teacher, w, given.prior)
        learns = x if student else w
        (found,) = torch.autograd.grad(terms.loss, learns)
        whole = protocpc_step(*given).loss
        (expected,) = torch.autograd.grad(whole, given.student if student else given.prototypes)
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        silent = protocpc_step(*given)
    assert not silent.loss.requires_grad
    torch.testing.assert_close(silent.loss, whole.detach())


@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
@pytest.mark.parametrize("temperature", [0.04, 0.025, 0.01, 1e-3])
@pytest.mark.parametrize("kind", ["random", "duplicates", "collapsed", "one prototype", "far"])
def test_degenerate_features_stay_finite(kind: str, temperature: float, assignment: str) -> None:
    given = Given(*(x.detach().float() for x in make(2, 1)))
    student, teacher, prototypes, prior = given
    if kind == "duplicates":
        teacher, student = teacher[:, :1].expand_as(teacher), student[:, :1].expand_as(student)
        prototypes = prototypes[:7].repeat(3, 1)
    if kind == "collapsed":
        teacher, student = torch.ones_like(teacher), torch.ones_like(student)
    if kind == "one prototype":
        prototypes = prototypes[:1].expand_as(prototypes).clone()
    if kind == "far":
        # All samples at one pole, the prototypes at the other but for one.
        teacher = torch.zeros_like(teacher)
        teacher[..., 0] = 1
        prototypes = torch.zeros_like(prototypes)
        prototypes[:, 0] = -1
        prototypes[0, 0] = 1
    student, prototypes = student.clone().requires_grad_(), prototypes.clone().requires_grad_()
    terms = protocpc_step(
        student,
        teacher,
        prototypes,
        prior,
        teacher_temperature=temperature,
        student_temperature=temperature,
        assignment=assignment,  # type: ignore[arg-type]
    )
    terms.loss.backward()
    assert terms.loss.isfinite()
    torch.testing.assert_close(terms.prior.sum(), torch.tensor(float(K)))
    assert student.grad is not None
    assert prototypes.grad is not None
    assert student.grad.isfinite().all()
    assert prototypes.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.04, 0.01])
@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
def test_half_precision_products_are_near(assignment: str, temperature: float) -> None:
    given = [x.detach().float() for x in make(2, 1)]
    student, prototypes = given[0].requires_grad_(), given[2].requires_grad_()
    options: dict[str, Any] = {"assignment": assignment, "teacher_temperature": temperature}
    terms = [
        protocpc_step(*given, **options, compute_dtype=dtype)  # type: ignore[misc]
        for dtype in (None, torch.bfloat16)
    ]
    assert terms[1].loss.dtype == torch.float32
    torch.testing.assert_close(terms[1].loss, terms[0].loss, rtol=2e-2, atol=0)
    torch.testing.assert_close(terms[1].prior.sum(), torch.tensor(float(K)))
    for learns in (student, prototypes):
        own, near = (torch.autograd.grad(t.loss, learns, retain_graph=True)[0] for t in terms)
        assert near.dtype == torch.float32
        assert 0 < float((near - own).norm() / own.norm()) < 0.1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.04, 0.01])
@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
def test_runs_without_looking_at_values(
    assignment: Any, temperature: float, dtype: torch.dtype | None
) -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    given = [x.detach().float().to("meta") for x in make(3, 2)]
    for index in (0, 2):
        given[index].requires_grad_()
    terms = protocpc_step(
        *given,  # type: ignore[misc]
        targets=torch.ones(3, 2, device="meta"),
        student_temperature=temperature,
        teacher_temperature=temperature,
        assignment=assignment,
        compute_dtype=dtype,
    )
    terms.loss.backward()
    assert all(term.is_meta for term in terms)
    assert given[0].grad is not None
    assert given[2].grad is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"student": torch.ones(9, 4)}, r"student must be \(V, N, D\)"),
        ({"teacher": torch.ones(1, 8, 4)}, r"got student \(1, 9, 4\) and teacher \(1, 8, 4\)"),
        ({"student": torch.ones(0, 9, 4)}, r"there must be a view and a sample"),
        ({"prototypes": torch.ones(21, 5)}, r"prototypes must be \(K, 4\)"),
        ({"teacher_prototypes": torch.ones(21, 5)}, r"teacher_prototypes must be \(K, 4\)"),
        ({"teacher_prototypes": torch.ones(20, 4)}, r"must be of one K"),
        ({"prior": torch.ones(20)}, r"must be of one K"),
        ({"targets": torch.ones(2, 1)}, r"targets must be \(1, 1\).* got \(2, 1\)"),
        ({"student_temperature": 0}, r"student_temperature=0: must be above 0"),
        ({"teacher_temperature": -1}, r"teacher_temperature=-1: must be above 0"),
        ({"iterations": 0}, r"iterations=0: must be 1 or more"),
        ({"prior_momentum": 1.1}, r"prior_momentum=1.1: must be in \[0, 1\]"),
        ({"assignment": "hard"}, r"assignment='hard': must be one of 'sinkhorn', 'softmax'"),
        ({"prior_order": "never"}, r"prior_order='never': must be one of"),
        ({"loss": "kl"}, r"loss='kl': must be one of 'protocpc', 'ce'"),
    ],
)
def test_step_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protocpc_step(**{**make()._asdict(), **options})
