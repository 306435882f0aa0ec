"""Class weights of the margin losses, and the critic of CPC."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from solo_ext.losses import arcface_loss_func, bilinear_info_nce_loss_func
from solo_ext.memory.heads import BilinearCritic, ClassWeights


def test_gives_cosines() -> None:
    torch.manual_seed(0)
    head, x = ClassWeights(4, 3).double(), 7 * torch.randn(5, 3, dtype=torch.float64)
    cosine = head(x)
    expected = F.cosine_similarity(x.unsqueeze(1), head.weight.unsqueeze(0), dim=2)
    torch.testing.assert_close(cosine, expected)
    with torch.no_grad():
        head.weight.mul_(100)
    torch.testing.assert_close(head(x), cosine)
    assert {n for n, _ in head.named_parameters()} == {"weight"}


def test_starts_with_directions_of_about_unit_length() -> None:
    torch.manual_seed(0)
    norms = ClassWeights(50, 256).weight.norm(dim=1)
    assert ((norms > 0.8) & (norms < 1.2)).all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_leaves_cosines_in_single_precision(half: torch.dtype) -> None:
    torch.manual_seed(0)
    head, x = ClassWeights(4, 3), torch.randn(5, 3).to(half).requires_grad_()
    with torch.autocast("cpu", dtype=half):
        cosine = head(x)
    assert torch.equal(cosine, head(x.float()))
    assert cosine.dtype == torch.float32
    arcface_loss_func(cosine, torch.zeros(5).long()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("rows", ["aligned", "opposite", "zero"])
def test_extreme_features_train(rows: str) -> None:
    torch.manual_seed(0)
    head = ClassWeights(3, 4)
    factor = {"aligned": 5, "opposite": -5, "zero": 0}[rows]
    x = (factor * head.weight.detach()).requires_grad_()
    arcface_loss_func(head(x), torch.arange(3)).backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


def test_run_on_meta() -> None:
    x, c = torch.empty(5, 3, device="meta"), torch.empty(2, 4, device="meta")
    assert ClassWeights(4, 3).to("meta")(x).is_meta
    assert BilinearCritic(3, 4).to("meta")(x, c).is_meta


def test_rematching_moves_the_weights_in_place() -> None:
    torch.manual_seed(0)
    head = ClassWeights(4, 3)
    before, place = head.weight.detach().clone(), head.weight.data_ptr()
    head.rematch_(torch.tensor([2, 0, 3, 1]))
    assert torch.equal(head.weight, before[[2, 0, 3, 1]])
    assert head.weight.data_ptr() == place
    assert head.weight.requires_grad


def test_optimizer_state_moves_along() -> None:
    """Training goes on as though the classes had been renumbered from the start."""
    match = torch.tensor([2, 0, 3, 1])
    x, target = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    ended = []
    for early in (True, False):
        torch.manual_seed(0)
        head = ClassWeights(4, 3)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
        # Old class match[c] is the new class c.
        labels = target
        if early:
            head.rematch_(match)
            labels = match.argsort()[target]
        for number in range(6):
            if number == 3 and not early:
                head.rematch_(match, optimizer.state[head.weight])
                labels = match.argsort()[target]
            optimizer.zero_grad()
            arcface_loss_func(head(x), labels, 8.0).backward()
            optimizer.step()
        ended.append(head.weight.detach())
    torch.testing.assert_close(*ended)


def test_state_of_other_shapes_stays() -> None:
    head = ClassWeights(4, 3)
    state = {"step": torch.tensor(3.0), "row": torch.arange(3.0), "momentum": None, "lr": 0.1}
    head.rematch_(torch.tensor([1, 0, 2, 3]), state)
    assert state["step"] == 3
    assert torch.equal(torch.as_tensor(state["row"]), torch.arange(3.0))
    assert state["momentum"] is None


@pytest.mark.parametrize("match", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2]])
def test_refuses_what_is_no_permutation(match: list[int]) -> None:
    head = ClassWeights(4, 3)
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match="must hold each of 0 to 3 once"):
        head.rematch_(torch.tensor(match))
    assert torch.equal(head.weight, before)


def test_scores_every_query_with_every_context() -> None:
    torch.manual_seed(0)
    critic = BilinearCritic(3, 4).double()
    z, c = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    scores = critic(z, c)
    assert scores.shape == (5, 2)
    for n in range(5):
        for k in range(2):
            products = [z[n, a] * critic.weight[a, b] * c[k, b] for a in range(3) for b in range(4)]
            torch.testing.assert_close(scores[n, k], torch.stack(products).sum())


def test_is_the_critic_of_the_loss() -> None:
    torch.manual_seed(0)
    critic = BilinearCritic(3, 4)
    z, c = torch.randn(5, 3), torch.randn(5, 4)
    expected = F.cross_entropy(critic(z, c) / 0.5, torch.arange(5))
    found = bilinear_info_nce_loss_func(z, c, critic.weight, 0.5)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert critic.weight.grad is not None
    assert critic.weight.grad.any()


def test_scores_start_with_unit_variance() -> None:
    torch.manual_seed(0)
    scores = BilinearCritic(64, 128)(torch.randn(200, 64), torch.randn(200, 128))
    assert scores.std().item() == pytest.approx(1, rel=0.1)


def test_learns_to_tell_contexts_apart() -> None:
    """A query that is a rotation of its context is found by the rotation's matrix."""
    torch.manual_seed(0)
    critic, turn = BilinearCritic(16, 16), torch.linalg.qr(torch.randn(16, 16)).Q
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.03)
    for _ in range(100):
        c = torch.randn(32, 16)
        loss = bilinear_info_nce_loss_func(c @ turn.T, c, critic.weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 * math.log(32)
    assert F.cosine_similarity(critic.weight.flatten(), turn.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_leaves_scores_in_single_precision(half: torch.dtype) -> None:
    critic = BilinearCritic(3, 4)
    z, c = torch.randn(5, 3).to(half), torch.randn(2, 4).to(half)
    with torch.autocast("cpu", dtype=half):
        scores = critic(z, c)
    assert torch.equal(scores, critic(z.float(), c.float()))
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_refuse_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"num_classes={sizes[0]}, dim={sizes[1]}"):
        ClassWeights(*sizes)
    with pytest.raises(ValueError, match=f"query_dim={sizes[0]}, context_dim={sizes[1]}"):
        BilinearCritic(*sizes)
