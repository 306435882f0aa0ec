"""NT-Xent against the paper's formula, one similarity at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, nt_xent_loss_func
from solo_ext.losses.contrastive import batch_of_views

TEMPERATURES = [0.01, 0.07, 0.1, 0.5, 2.0]


def make_views(batch: int, dim: int = 5, *, seed: int = 0, noise: float = 0.7) -> list[Tensor]:
    """Returns two fp64 views, similar row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    noises = torch.randn(2, batch, dim, generator=generator, dtype=torch.float64)
    scales = 0.2 + 5 * torch.rand(2, batch, 1, generator=generator, dtype=torch.float64)
    return list(scales * (centres + noise * noises))


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def loop(z1: Tensor, z2: Tensor, temperature: float) -> float:
    """Eq. 1 of the paper as it is written: loops over anchors and samples."""
    rows, batch = [*z1.tolist(), *z2.tolist()], len(z1)
    losses = []
    for i, anchor in enumerate(rows):
        similar = [cosine(anchor, row) / temperature for row in rows]
        denominator = sum(math.exp(s) for k, s in enumerate(similar) if k != i)
        losses.append(math.log(denominator) - similar[(i + batch) % (2 * batch)])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("batch", "dim"), [(1, 3), (2, 2), (3, 8), (7, 1), (9, 16)])
def test_equals_the_loop(batch: int, dim: int, temperature: float) -> None:
    z1, z2 = make_views(batch, dim)
    found = nt_xent_loss_func(z1, z2, temperature)
    assert found.shape == ()
    assert found.item() == pytest.approx(loop(z1, z2, temperature), rel=1e-10, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 6),
    dim=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.02, 5.0),
)
def test_equals_the_loop_anywhere(batch: int, dim: int, seed: int, temperature: float) -> None:
    z1, z2 = make_views(batch, dim, seed=seed)
    expected = loop(z1, z2, temperature)
    found = nt_xent_loss_func(z1, z2, temperature).item()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_default_temperature() -> None:
    z1, z2 = make_views(4)
    assert torch.equal(nt_xent_loss_func(z1, z2), nt_xent_loss_func(z1, z2, 0.5))


@pytest.mark.parametrize("temperature", [0.1, 0.5])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_gradcheck(batch: int, temperature: float) -> None:
    views = [z.requires_grad_() for z in make_views(batch, 3)]
    assert torch.autograd.gradcheck(lambda a, b: nt_xent_loss_func(a, b, temperature), views)


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    exponents=st.tuples(st.integers(-6, 6), st.integers(-6, 6)),
)
def test_symmetries(batch: int, seed: int, exponents: tuple[int, int]) -> None:
    """Neither the scale of the rows, nor the order of views or samples, matters."""
    z1, z2 = make_views(batch, seed=seed)
    expected = nt_xent_loss_func(z1, z2, 0.2)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    scaled = nt_xent_loss_func(z1 * 10.0 ** exponents[0], z2 * 10.0 ** exponents[1], 0.2)
    for found in (
        nt_xent_loss_func(z2, z1, 0.2),
        nt_xent_loss_func(z1[order], z2[order], 0.2),
        scaled,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_pairs_matter() -> None:
    z1, z2 = make_views(5)
    assert nt_xent_loss_func(z1, z2.roll(1, 0)) > nt_xent_loss_func(z1, z2) + 0.1


def test_one_sample_gives_zero_on_the_graph() -> None:
    z1, z2 = (z.requires_grad_() for z in make_views(1))
    loss = nt_xent_loss_func(z1, z2)
    assert loss.item() == 0
    loss.backward()
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


@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    ["collapsed", "opposite", "duplicate", "views equal", "zero row", "zero pair", "all zero"],
)
def test_awkward_rows_stay_finite(case: str, dtype: torch.dtype, temperature: float) -> None:
    views = [z.clone().requires_grad_() for z in awkward(case, dtype)]
    loss = nt_xent_loss_func(*views, temperature)
    loss.backward()
    assert loss.isfinite()
    assert all(z.grad is not None and z.grad.isfinite().all() for z in views)
    if case in ("collapsed", "all zero"):
        assert loss.item() == pytest.approx(math.log(7), rel=1e-5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_single_precision_keeps_up(temperature: float) -> None:
    views = make_views(32, 16)
    exact = [z.requires_grad_() for z in views]
    single = [z.detach().float().requires_grad_() for z in views]
    expected, found = (nt_xent_loss_func(*v, temperature) for v in (exact, single))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-5)
    expected.backward()
    found.backward()
    for z, reference in zip(single, exact, strict=True):
        assert z.grad is not None
        assert reference.grad is not None
        error = (z.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 1e-3


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
def test_autocast_computes_in_single_precision(half: torch.dtype, temperature: float) -> None:
    views = [z.float() for z in make_views(32, 16)]
    halves = [z.to(half).requires_grad_() for z in views]
    with torch.autocast("cpu", dtype=half):
        assert F.linear(views[0], views[1]).dtype == half, "autocast must be on"
        from_single = nt_xent_loss_func(*views, temperature)
        from_half = nt_xent_loss_func(*halves, temperature)
        batch = batch_of_views(halves)
    assert from_single.dtype == from_half.dtype == torch.float32
    assert {x.dtype for x in batch[:3]} == {torch.float32}
    assert torch.equal(from_single, nt_xent_loss_func(*views, temperature))
    # What is lost is what rounding the inputs loses, and nothing more.
    rounded = nt_xent_loss_func(*(z.float() for z in halves), temperature)
    assert torch.equal(from_half, rounded)
    if temperature == 0.5:
        torch.testing.assert_close(from_half, from_single, rtol=2e-3, atol=0)
    from_half.backward()
    assert all(z.grad is not None and z.grad.dtype == half for z in halves)
    assert all(z.grad is not None and z.grad.isfinite().all() for z in halves)


def test_runs_without_looking_at_values() -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    z1 = torch.empty(6, 4, device="meta", requires_grad=True)
    z2 = torch.empty(6, 4, device="meta", requires_grad=True)
    loss = nt_xent_loss_func(z1, z2, 0.1)
    loss.backward()
    assert loss.shape == ()
    assert z1.grad is not None
    assert z2.grad is not None


@pytest.mark.parametrize("temperature", [0.0, -0.1, math.nan])
def test_refuses_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        nt_xent_loss_func(*make_views(3), temperature)


@pytest.mark.parametrize(
    ("first", "second"), [((3, 4), (4, 4)), ((3, 4), (3, 5)), ((4,), (4,)), ((2, 3, 4), (2, 3, 4))]
)
def test_refuses_shapes(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        nt_xent_loss_func(torch.ones(first), torch.ones(second))


def test_is_registered() -> None:
    entry = LOSSES["nt_xent_loss_func"]
    assert entry.target is nt_xent_loss_func
    assert entry.arxiv == "2002.05709"
