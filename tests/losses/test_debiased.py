"""The debiased loss against the paper's formula, one similarity at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, debiased_loss_func, nt_xent_loss_func
from solo_ext.losses.contrastive import ContrastiveTerms, NegativeEstimator, estimated_terms

TEMPERATURES = [0.01, 0.07, 0.1, 0.5, 2.0]


def make_views(batch: int, dim: int = 5, *, seed: int = 0, noise: float = 0.7) -> list[Tensor]:
    """Returns two fp64 views, similar row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    noises = torch.randn(2, batch, dim, generator=generator, dtype=torch.float64)
    scales = 0.2 + 5 * torch.rand(2, batch, 1, generator=generator, dtype=torch.float64)
    return list(scales * (centres + noise * noises))


def debiased_terms(z1: Tensor, z2: Tensor, temperature: float, tau_plus: float) -> ContrastiveTerms:
    return estimated_terms(z1, z2, temperature, NegativeEstimator(tau_plus))


def loop(z1: Tensor, z2: Tensor, temperature: float, tau_plus: float) -> tuple[Tensor, float]:
    """Eq. 7 and 8 of the paper as written, on scalars that carry a gradient: loss, floored."""
    rows, batch = [F.normalize(z, dim=0) for z in (*z1, *z2)], len(z1)
    losses, floored = [], 0
    for i, anchor in enumerate(rows):
        j = (i + batch) % (2 * batch)
        positive = (torch.dot(anchor, rows[j]) / temperature).exp()
        others = [row for k, row in enumerate(rows) if k not in (i, j)]
        if not others:
            losses.append(-(positive / positive).log())
            continue
        mean = sum((torch.dot(anchor, row) / temperature).exp() for row in others) / len(others)
        estimate = (mean - tau_plus * positive) / (1 - tau_plus)
        floor = math.exp(-1 / temperature)
        if estimate.item() <= floor:
            floored += 1
            estimate = torch.tensor(floor, dtype=z1.dtype)
        losses.append(-(positive / (positive + len(others) * estimate)).log())
    return torch.stack(losses).mean(), floored / len(rows)


def gradients(loss: Tensor, views: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, views))


@pytest.mark.parametrize("tau_plus", [0.0, 0.05, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("batch", "dim"), [(1, 3), (2, 2), (7, 1), (9, 16)])
def test_equals_the_loop(batch: int, dim: int, temperature: float, tau_plus: float) -> None:
    z1, z2 = make_views(batch, dim)
    expected, floored = loop(z1, z2, temperature, tau_plus)
    terms = debiased_terms(z1, z2, temperature, tau_plus)
    assert terms.loss.shape == terms.floored.shape == ()
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    # In one dimension every cosine is 1 or -1: estimates lie on the floor but for rounding.
    if dim > 1:
        assert terms.floored.item() == pytest.approx(floored, abs=1e-12)
    assert torch.equal(debiased_loss_func(z1, z2, temperature, tau_plus), terms.loss)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 5),
    dim=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5.0),
    tau_plus=st.floats(0.0, 0.95),
)
def test_value_and_gradient_equal_the_loop(
    batch: int, dim: int, seed: int, temperature: float, tau_plus: float
) -> None:
    views = [z.requires_grad_() for z in make_views(batch, dim, seed=seed)]
    reference, _ = loop(*views, temperature, tau_plus)
    loss = debiased_loss_func(*views, temperature, tau_plus)
    torch.testing.assert_close(loss, reference, rtol=1e-8, atol=1e-11)
    for found, expected in zip(gradients(loss, views), gradients(reference, views), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 8),
    dim=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.02, 5.0),
)
def test_no_prior_is_nt_xent(batch: int, dim: int, seed: int, temperature: float) -> None:
    views = [z.requires_grad_() for z in make_views(batch, dim, seed=seed)]
    found, expected = (
        debiased_loss_func(*views, temperature, 0.0),
        nt_xent_loss_func(*views, temperature),
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if dim > 1:
        for a, b in zip(gradients(found, views), gradients(expected, views), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_defaults() -> None:
    views = make_views(6)
    assert torch.equal(debiased_loss_func(*views), debiased_loss_func(*views, 0.5, 0.1))


@pytest.mark.parametrize(
    ("temperature", "tau_plus", "noise"),
    [(0.5, 0.1, 0.7), (0.5, 0.0, 0.7), (1.0, 0.3, 0.7), (0.1, 0.1, 0.1), (0.5, 0.1, 0.2)],
)
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_gradcheck(batch: int, temperature: float, tau_plus: float, noise: float) -> None:
    views = [z.requires_grad_() for z in make_views(batch, 3, noise=noise)]
    assert torch.autograd.gradcheck(
        lambda a, b: debiased_loss_func(a, b, temperature, tau_plus), views
    )


def test_floored_anchors_do_not_push_their_negatives() -> None:
    """On the floor only the positive is left: the gradient is that of a loss without negatives."""
    views = [z.requires_grad_() for z in make_views(6, 16, noise=0.1)]
    terms = debiased_terms(*views, 0.1, 0.1)
    assert terms.floored.item() == 1
    assert not terms.floored.requires_grad
    positive = F.cosine_similarity(*views) / 0.1
    alone = F.softplus(math.log(10) - 1 / 0.1 - positive).mean()
    torch.testing.assert_close(terms.loss, alone, rtol=1e-6, atol=0)
    for found, expected in zip(gradients(terms.loss, views), gradients(alone, views), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-14)


def test_only_floored_anchors_lose_their_negatives() -> None:
    """Fed similarities of their own, anchors show to whom their gradient goes."""
    positive = torch.tensor([9.0, 1.0, 9.0, 0.0], dtype=torch.float64, requires_grad=True)
    logits = torch.tensor([[-1.0, 0.5]] * 3 + [[2.0, 8.0]], dtype=torch.float64, requires_grad=True)
    lse = logits.logsumexp(1).unsqueeze(0)
    mass, floored = NegativeEstimator(0.2)(lse, positive.unsqueeze(1), 2, 0.1)
    assert floored.tolist() == [True, False, True, False]
    assert not floored.requires_grad
    torch.testing.assert_close(
        mass[floored].detach(), torch.full((2,), math.log(2) - 10.0).double()
    )
    F.softplus(mass - positive).mean().backward()
    assert logits.grad is not None
    assert positive.grad is not None
    assert (logits.grad != 0).tolist() == [[False] * 2, [True] * 2, [False] * 2, [True] * 2]
    assert (positive.grad < 0).all()


def test_estimate_of_nothing_sits_on_the_floor() -> None:
    """Half the samples' mass is taken for the anchor's class, and that is all there is."""
    lse = torch.tensor([[0.5]], dtype=torch.float64).log().requires_grad_()
    positive = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    mass, floored = NegativeEstimator(0.5)(lse, positive, 1, 0.1)
    assert floored.item()
    assert mass.item() == -10
    assert [g.item() for g in torch.autograd.grad(mass.sum(), [lse, positive])] == [0, 0]


@pytest.mark.parametrize(
    ("temperature", "tau_plus", "lowest", "highest"),
    [(0.5, 0.0, 0, 0), (0.5, 0.1, 0, 0.05), (0.1, 0.1, 0.95, 1), (0.1, 1e-6, 0, 0.05)],
)
def test_floored_share_at_usual_settings(
    temperature: float, tau_plus: float, lowest: float, highest: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(128, 128, generator=generator), dim=1)
    other = F.normalize(torch.randn(128, 128, generator=generator), dim=1)
    terms = debiased_terms(rows, 0.9 * rows + math.sqrt(1 - 0.81) * other, temperature, tau_plus)
    assert lowest <= terms.floored.item() <= highest


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    exponents=st.tuples(st.integers(-6, 6), st.integers(-6, 6)),
)
def test_symmetries(batch: int, seed: int, exponents: tuple[int, int]) -> None:
    """Neither the scale of the rows, nor the order of views or samples, matters."""
    z1, z2 = make_views(batch, seed=seed)
    expected = debiased_loss_func(z1, z2, 0.3, 0.1)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    scaled = debiased_loss_func(z1 * 10.0 ** exponents[0], z2 * 10.0 ** exponents[1], 0.3, 0.1)
    for found in (
        debiased_loss_func(z2, z1, 0.3, 0.1),
        debiased_loss_func(z1[order], z2[order], 0.3, 0.1),
        scaled,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
def test_one_sample_gives_zero_on_the_graph(tau_plus: float) -> None:
    z1, z2 = (z.requires_grad_() for z in make_views(1))
    terms = debiased_terms(z1, z2, 0.5, tau_plus)
    assert terms.loss.item() == terms.floored.item() == 0
    terms.loss.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert not z1.grad.any()
    assert not z2.grad.any()


def awkward(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns views that a failing or starting network may give."""
    z1, z2 = (z.to(dtype) for z in make_views(4))
    ones, zeros = torch.ones_like(z1), torch.zeros_like(z1)
    first = torch.arange(4).unsqueeze(1) == 1
    return {
        "collapsed": (ones, ones),
        "opposite": (ones, -ones),
        "duplicate": (z1[[0, 0, 2, 3]], z2[[0, 0, 2, 3]]),
        "views equal": (z1, z1),
        "zero row": (torch.where(first, zeros, z1), z2),
        "zero pair": (torch.where(first, zeros, z1), torch.where(first, zeros, z2)),
        "all zero": (zeros, zeros),
    }[name]


@pytest.mark.parametrize("tau_plus", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    ["collapsed", "opposite", "duplicate", "views equal", "zero row", "zero pair", "all zero"],
)
def test_awkward_rows_stay_finite(
    case: str, dtype: torch.dtype, temperature: float, tau_plus: float
) -> None:
    views = [z.clone().requires_grad_() for z in awkward(case, dtype)]
    loss = debiased_loss_func(*views, temperature, tau_plus)
    loss.backward()
    assert loss.isfinite()
    assert all(z.grad is not None and z.grad.isfinite().all() for z in views)
    if case == "collapsed":
        # All similarities are 1, and so is their debiased mean.
        assert loss.item() == pytest.approx(math.log(7), rel=1e-4)


@pytest.mark.parametrize("tau_plus", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_single_precision_keeps_up(temperature: float, tau_plus: float) -> None:
    views = make_views(32, 16, noise=1.5)
    exact = [z.requires_grad_() for z in views]
    single = [z.detach().float().requires_grad_() for z in views]
    expected, found = (debiased_loss_func(*v, temperature, tau_plus) for v in (exact, single))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    for a, b in zip(gradients(found, single), gradients(expected, exact), strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-3


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
def test_autocast_computes_in_single_precision(half: torch.dtype, temperature: float) -> None:
    views = [z.float() for z in make_views(32, 16)]
    halves = [z.to(half).requires_grad_() for z in views]
    with torch.autocast("cpu", dtype=half):
        assert F.linear(views[0], views[1]).dtype == half, "autocast must be on"
        from_single = debiased_loss_func(*views, temperature)
        from_half = debiased_loss_func(*halves, temperature)
    assert from_single.dtype == from_half.dtype == torch.float32
    assert torch.equal(from_single, debiased_loss_func(*views, temperature))
    # What is lost is what rounding the inputs loses, and nothing more.
    assert torch.equal(from_half, debiased_loss_func(*(z.float() for z in halves), temperature))
    if temperature == 0.5:
        torch.testing.assert_close(from_half, from_single, rtol=2e-3, atol=0)
    from_half.backward()
    assert all(z.grad is not None and z.grad.dtype == half for z in halves)
    assert all(z.grad is not None and z.grad.isfinite().all() for z in halves)


def test_runs_without_looking_at_values() -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    z1 = torch.empty(6, 4, device="meta", requires_grad=True)
    z2 = torch.empty(6, 4, device="meta", requires_grad=True)
    terms = debiased_terms(z1, z2, 0.1, 0.1)
    terms.loss.backward()
    assert terms.loss.shape == terms.floored.shape == ()
    assert z1.grad is not None
    assert z2.grad is not None


@pytest.mark.parametrize("tau_plus", [-0.1, 1.0, 1.5, math.nan])
def test_refuses_tau_plus(tau_plus: float) -> None:
    with pytest.raises(ValueError, match="tau_plus"):
        debiased_loss_func(*make_views(3), 0.5, tau_plus)


@pytest.mark.parametrize("temperature", [0.0, -0.1, math.nan])
def test_refuses_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        debiased_loss_func(*make_views(3), temperature)


@pytest.mark.parametrize(
    ("first", "second"), [((3, 4), (4, 4)), ((3, 4), (3, 5)), ((4,), (4,)), ((2, 3, 4), (2, 3, 4))]
)
def test_refuses_shapes(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        debiased_loss_func(torch.ones(first), torch.ones(second))


def test_is_registered() -> None:
    entry = LOSSES["debiased_loss_func"]
    assert entry.target is debiased_loss_func
    assert entry.arxiv == "2007.00224"
