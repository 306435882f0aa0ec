"""The critic of CPC."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from solo_ext.losses import bilinear_info_nce_loss_func
from solo_ext.memory.heads import BilinearCritic


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


def test_runs_on_meta() -> None:
    critic = BilinearCritic(3, 4).to("meta")
    assert critic(torch.empty(5, 3, device="meta"), torch.empty(2, 4, device="meta")).is_meta


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_refuses_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"query_dim={sizes[0]}, context_dim={sizes[1]}"):
        BilinearCritic(*sizes)
