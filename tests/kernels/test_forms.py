"""The forms that dispatch chooses between give the same results and the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.in_batch import batch_contrast
from solo_ext.kernels.mixed_logsumexp import MixDraws, mixed_logsumexp
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import Assignment, assign
from solo_ext.losses.contrastive import NegativeEstimator, two_view_terms
from solo_ext.memory import sinkhorn

Found = tuple[Tensor, ...]
Tiled = Callable[[int | None], None]
Force = Callable[[dispatch.Form], None]
D = 6


def rows(count: int, *lead: int) -> Tensor:
    return F.normalize(torch.randn(*lead, count, D, dtype=torch.float64), dim=-1)


def in_batch(powers: tuple[float, ...], extra: bool) -> Callable[..., Found]:
    own = torch.randint(11, (7, 1))
    more = torch.randn(len(powers), 7, dtype=torch.float64) if extra else None

    def reduce(masses: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(masses.sum(0) - positives.sum(1)), masses

    def work(anchors: Tensor, candidates: Tensor, positives: Tensor) -> Found:
        return batch_contrast(anchors, candidates, own, positives, 3.0, powers, reduce, more)

    return work


def two_views(estimator: NegativeEstimator) -> Callable[..., Found]:
    def work(z1: Tensor, z2: Tensor) -> Found:
        return two_view_terms(z1, z2, temperature=0.5, estimator=estimator)

    return work


def targets(scores: Tensor, iterations: int) -> Assignment:
    return assign(lambda r, c: scores[r, c] * 1, tuple(scores.shape), scores, iterations)


def of_prototypes(prior: bool, dtype: torch.dtype) -> Callable[..., Found]:
    teachers = [targets(torch.randn(9, 13, dtype=torch.float64), n) for n in (0, 3)]
    weights = torch.rand(3, 2, dtype=torch.float64)
    q = torch.rand(13, dtype=torch.float64) + 0.1 if prior else None

    def work(student: Tensor, prototypes: Tensor) -> Found:
        shared = teachers, weights / weights.sum(), q, 4.0
        table = prototypes.detach().to(dtype)
        return prototype_contrast(student, prototypes, *shared, table=table)

    return work


def mixed(with_table: bool, pairs: int, singles: int, exclude: bool) -> Callable[..., Found]:
    draws = MixDraws(
        torch.randint(4, (7, pairs, 2)),
        torch.rand(7, pairs, dtype=torch.float64),
        torch.randint(4, (7, singles)),
        torch.rand(7, singles, dtype=torch.float64) / 2,
    )
    table = rows(20)
    ids = {"query_ids": torch.arange(7), "table_ids": torch.arange(20) % 10} if exclude else {}
    columns = torch.randint(20, (7, 2)) if exclude else None

    def work(query: Tensor) -> Found:
        settings = 5.0, draws, 4, (1.0, 0.5)
        return mixed_logsumexp(
            query, table, *settings, excluded_columns=columns, with_table=with_table, **ids
        )

    return work


def of_sinkhorn(products: bool) -> Callable[..., Found]:
    logits = 4 * rows(9) @ rows(13).T

    def work() -> Found:
        return assign(lambda r, c: logits[r, c] * 1, (9, 13), logits, 3, products=products)

    return work


def cases() -> Iterator[Any]:
    torch.manual_seed(0)
    for powers, extra in (((1.0,), False), ((1.0, 2.0), True)):
        given = [rows(7), rows(11), torch.randn(7, 2, dtype=torch.float64)]
        yield pytest.param(in_batch(powers, extra), given, id=f"in-batch-{len(powers)}")
    for estimator in (NegativeEstimator(), NegativeEstimator(tau_plus=0.1, beta=1.0)):
        yield pytest.param(two_views(estimator), [rows(5), rows(5)], id=f"views-{estimator.beta}")
    for prior, dtype in ((False, torch.float64), (True, torch.float64), (True, torch.bfloat16)):
        given = [rows(9, 3), rows(13)]
        yield pytest.param(of_prototypes(prior, dtype), given, id=f"prototypes-{prior}-{dtype}")
    for settings in ((True, 5, 3, False), (True, 5, 0, True), (False, 0, 3, True)):
        yield pytest.param(mixed(*settings), [rows(7)], id=f"mixed-{settings}")
    for products in (False, True):
        yield pytest.param(of_sinkhorn(products), [], id=f"sinkhorn-{products}")


@pytest.mark.parametrize(("work", "given"), list(cases()))
def test_forms_are_equal(
    work: Callable[..., Found],
    given: list[Tensor],
    force: Force,
    tiled: Tiled,
    request: pytest.FixtureRequest,
) -> None:
    def with_gradients() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in given]
        found = work(*inputs)
        learns = [x.sum() for x in found if x.requires_grad]
        return [*found, *(torch.autograd.grad(sum(learns), inputs) if inputs else ())]

    force("plain")
    plain = with_gradients()
    tiled(2)
    tiles = with_gradients()
    # bf16 rounds the gradients to its factors, and the forms add them up in another order.
    limit = 1e-2 if "bfloat16" in request.node.name else 1e-9
    for one, other in zip(plain, tiles, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert (one - other).nan_to_num().norm() <= limit * other.nan_to_num().norm()


@pytest.mark.parametrize(("work", "given"), [case for case in cases() if case.values[1]])
def test_tiles_refuse_to_be_differentiated_twice(
    work: Callable[..., Found], given: list[Tensor], tiled: Tiled
) -> None:
    """Their gradient is a constant to autograd: the second would be wrong."""
    tiled(2)
    inputs = [x.clone().requires_grad_() for x in given]
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(work(*inputs)[0].sum(), inputs, create_graph=True)


def test_sinkhorn_s_form_depends_on_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only on the prototypes, where scores are given and no features."""
    sizes: list[int] = []

    def note(operation: str, forms: Any, inputs: Any, columns: int, details: Any) -> dispatch.Form:
        sizes.append(len(inputs[0]) * columns)
        return "tiles"

    monkeypatch.setattr(dispatch, "_form", note)
    sinkhorn(rows(9) @ rows(13).T, unit=True)
    assert sizes
    assert set(sizes) == {9 * 13}
