"""ProtoNCE and InfoNCE against loops over the paper's sums, their limits and properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func
from solo_ext.losses.info_nce import Collisions, proto_nce_terms

K, D = 12, 5


def unit(rows: int, seed: int, dim: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def concentration(seed: int, count: int = K) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.05 + 0.3 * torch.rand(count, generator=generator, dtype=torch.float64)


def by_loops(
    query: Tensor,
    prototypes: Tensor,
    phi: Tensor,
    positives: list[int],
    negatives: list[int] | None,
    collisions: str,
) -> float:
    """The paper's sum, one query and one prototype after the other."""
    total = 0.0
    for i, own in enumerate(positives):
        columns = list(range(len(prototypes))) if negatives is None else positives + negatives
        if collisions == "merge":
            columns = list(dict.fromkeys(columns))
        exponents = []
        for j in columns:
            dot = sum(float(query[i, d]) * float(prototypes[j, d]) for d in range(query.shape[1]))
            exponents.append(dot / float(phi[j]))
        dot = sum(float(query[i, d]) * float(prototypes[own, d]) for d in range(query.shape[1]))
        total += math.log(sum(math.exp(e) for e in exponents)) - dot / float(phi[own])
    return total / len(positives)


IDS = st.lists(st.integers(0, K - 1), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(
    positives=IDS,
    negatives=st.none() | IDS,
    collisions=st.sampled_from(["paper", "merge"]),
    seed=st.integers(0, 99),
)
def test_equals_the_loop(
    positives: list[int], negatives: list[int] | None, collisions: Collisions, seed: int
) -> None:
    """On any ids; collisions between queries and with the negatives are among them."""
    query, prototypes, phi = unit(len(positives), seed), unit(K, seed + 1), concentration(seed)
    found = proto_nce_loss_func(
        query,
        prototypes,
        phi,
        torch.tensor(positives),
        None if negatives is None else torch.tensor(negatives),
        collisions,
    )
    mode = "paper" if negatives is None else collisions
    expected = by_loops(query, prototypes, phi, positives, negatives, mode)
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_accuracy_is_the_share_of_nearest() -> None:
    prototypes, phi = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2, 0]])
    _, accuracy = proto_nce_terms(prototypes[None, [0, 1, 2, 3]], [prototypes], [phi], ids)
    assert float(accuracy) == 0.75
    # A batch-mate's copy of one's own prototype is no nearer one.
    ids = torch.tensor([[0, 0]])
    drawn = [torch.tensor([1])]
    _, accuracy = proto_nce_terms(prototypes[None, [0, 0]], [prototypes], [phi], ids, drawn)
    assert float(accuracy) == 1.0


@pytest.mark.parametrize("negatives", [None, [torch.tensor([5, 1, 11]), torch.tensor([4])]])
@pytest.mark.parametrize("collisions", ["paper", "merge"])
@pytest.mark.parametrize("kept", [False, True])
def test_views_of_the_same_images(
    negatives: list[Tensor] | None, collisions: Collisions, kept: bool
) -> None:
    """Of two clusterings each value, gradient and accuracy is the mean of each view alone."""
    tables, phis = [unit(K, 1), unit(7, 2)], [concentration(2), concentration(3, 7)]
    ids = torch.tensor([[0, 3, 3], [6, 0, 1]])
    seen = tables[0][ids[0]] + tables[1][ids[1]]
    views = torch.stack([unit(3, seed) + seen for seed in (5, 6)]).requires_grad_()
    scaled = [c / phi[:, None] for c, phi in zip(tables, phis, strict=True)] if kept else None
    rest = negatives, collisions, None, scaled
    rows = F.normalize(views, dim=-1)
    losses, accuracy = proto_nce_terms(rows, tables, phis, ids, *rest)
    for m, (prototypes, phi) in enumerate(zip(tables, phis, strict=True)):
        own = prototypes, phi, ids[m]
        drawn = None if negatives is None else negatives[m]
        loss = torch.stack(
            [proto_nce_loss_func(view, *own, drawn, collisions) for view in views]
        ).mean()
        torch.testing.assert_close(losses[m], loss, rtol=1e-12, atol=0)
        ours, theirs = (
            torch.autograd.grad(x, views, retain_graph=True)[0] for x in (losses[m], loss)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    alone = [proto_nce_terms(view[None], tables, phis, ids, *rest)[1] for view in rows]
    torch.testing.assert_close(accuracy, torch.stack(alone).mean(0))
    assert (accuracy > 0).any()
    with pytest.raises(ValueError, match=r"query must be \(N, D\), got \(2, 3, 5\)"):
        proto_nce_loss_func(views, tables[0], phis[0], ids[0])
    with pytest.raises(ValueError, match=r"positive_ids must be \(3,\).*\(2,\)"):
        proto_nce_terms(rows, tables, phis, ids[:, :2])


@pytest.mark.parametrize("negatives", [None, torch.tensor([5, 1, 11])])
@pytest.mark.parametrize("collisions", ["paper", "merge"])
@pytest.mark.parametrize("of", ["prototypes", "concentration"])
def test_what_learns_gets_the_gradient_of_the_formula(
    negatives: Tensor | None, collisions: Collisions, of: str
) -> None:
    query, prototypes, phi = unit(3, 0), unit(K, 1), concentration(2)
    ids = torch.tensor([0, 3, 3])
    learns = {"prototypes": prototypes, "concentration": phi}[of].requires_grad_()

    def loss(_: Tensor) -> Tensor:
        return proto_nce_loss_func(query, prototypes, phi, ids, negatives, collisions)

    assert torch.autograd.gradcheck(loss, learns)
    learns.requires_grad_(False)
    torch.testing.assert_close(loss(learns), loss(learns.requires_grad_()))


@pytest.mark.parametrize("drawn", [False, True])
def test_factors_of_half_precision(drawn: bool) -> None:
    """Also under autocast; every query is on its prototype, and is found there."""
    prototypes, phi = unit(400, 1, 32).float(), torch.full((400,), 0.1)
    # Some are their prototype itself, which rounding may put above their own similarity.
    ids = torch.arange(0, 90, 3)
    query = prototypes[ids] + 0.6 * unit(30, 0, 32).float()
    query = torch.cat((query[:15], prototypes[ids[15:]])).requires_grad_()
    negatives = torch.arange(100, 300) if drawn else None
    rest = (prototypes, phi, ids, negatives, "merge")
    drawn_ids = None if negatives is None else [negatives]
    lists: Any = ([prototypes], [phi], ids[None], drawn_ids, "merge")
    scaled = [(prototypes / phi[:, None]).bfloat16()]
    views = F.normalize(query, dim=1).unsqueeze(0)
    exact, found = proto_nce_terms(views, *lists)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, found_half = proto_nce_terms(views, *lists, torch.bfloat16)
        kept = proto_nce_terms(views, *lists, torch.bfloat16, scaled)
    torch.testing.assert_close(kept, (half, found_half))
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=0, atol=0.02)
    assert found_half == found == 1
    one, two = (torch.autograd.grad(x, query, retain_graph=True)[0] for x in (half, exact))
    assert (one - two).norm() < 0.05 * two.norm()
    assert torch.equal(half[0], proto_nce_loss_func(query, *rest, torch.bfloat16))


def test_info_nce_takes_another_dtype_for_constant_negatives_alone() -> None:
    query, key, queue = unit(4, 0), unit(4, 1), unit(9, 2)
    info_nce_loss_func(query, key, queue, compute_dtype=torch.bfloat16)
    queue.requires_grad_()
    info_nce_loss_func(query, key, queue).backward()
    with pytest.raises(ValueError, match=r"compute_dtype=torch\.bfloat16: is for constant neg"):
        info_nce_loss_func(query, key, queue, compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 100.0])
def test_extreme_concentrations_stay_finite(scale: float) -> None:
    query, prototypes = unit(4, 0).float().requires_grad_(), unit(K, 1).float()
    phi = torch.full((K,), scale)
    loss = proto_nce_loss_func(query, prototypes, phi, torch.tensor([0, 1, 1, 2]))
    loss.backward()
    assert loss.isfinite()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_refuses_what_does_not_fit() -> None:
    query, prototypes, phi, ids = unit(3, 0), unit(K, 1), concentration(2), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"prototypes must be \(K, 4\).*\(12, 5\)"):
        proto_nce_loss_func(query[:, :4], prototypes, phi, ids)
    with pytest.raises(ValueError, match=r"concentration must be \(12,\).*\(11,\)"):
        proto_nce_loss_func(query, prototypes, phi[1:], ids)
    with pytest.raises(ValueError, match=r"positive_ids must be \(3,\).*\(2,\)"):
        proto_nce_loss_func(query, prototypes, phi, ids[1:])
    with pytest.raises(ValueError, match="collisions='merged': must be 'paper' or 'merge'"):
        proto_nce_loss_func(query, prototypes, phi, ids, ids, "merged")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"query and positive.*\(3, 5\).*\(2, 5\)"):
        info_nce_loss_func(query, query[1:], prototypes)
    with pytest.raises(ValueError, match=r"negatives must be \(K, 5\).*\(12, 4\)"):
        info_nce_loss_func(query, query, prototypes[:, 1:])
    with pytest.raises(ValueError, match=r"temperature=0\.0: must be above 0"):
        info_nce_loss_func(query, query, prototypes, 0.0)
