import math

import pytest
import torch
import torch.nn.functional as F
from solo.losses import hard_negative_loss_func, simclr_loss_func


def loop(z1, z2, temperature, tau_plus, beta):
    """The loss anchor by anchor, in the notation of the papers."""
    z = F.normalize(torch.cat((z1, z2)), dim=1)
    b, losses = len(z1), []
    for i in range(2 * b):
        pos = torch.exp(z[i] @ z[(i + b) % (2 * b)] / temperature)
        neg = torch.exp(
            torch.stack([z[i] @ z[k] for k in range(2 * b) if k % b != i % b]) / temperature
        )
        N, weight = len(neg), neg**beta
        reweighted = (weight * neg).sum() / weight.mean()
        Ng = (reweighted - tau_plus * N * pos) / (1 - tau_plus)
        Ng = torch.clamp(Ng, min=N * math.exp(-1 / temperature))
        losses.append(-torch.log(pos / (pos + Ng)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("beta", [0, 0.5, 2])
@pytest.mark.parametrize("tau_plus", [0, 0.1])
def test_hard_negative_loss_is_that_of_the_paper(tau_plus, beta):
    z1, z2 = torch.randn(2, 8, 16).unbind()
    loss = hard_negative_loss_func(z1, z2, 0.5, tau_plus, beta)
    torch.testing.assert_close(loss, loop(z1.double(), z2.double(), 0.5, tau_plus, beta).float())


def test_hard_negative_loss_contains_simclr():
    z1, z2 = torch.randn(2, 8, 16).unbind()
    indexes = torch.arange(8).repeat(2)
    simclr = simclr_loss_func(torch.cat((z1, z2)), indexes, temperature=0.2)
    loss = hard_negative_loss_func(z1, z2, temperature=0.2, tau_plus=0, beta=0)
    torch.testing.assert_close(loss, simclr)


def test_hard_negative_loss_does_not_overflow():
    z1, z2 = torch.randn(2, 8, 16).unbind()
    z1 = z1.requires_grad_()
    loss = hard_negative_loss_func(z1, z2, temperature=0.01, tau_plus=0.1, beta=50)
    loss.backward()
    assert loss.isfinite() and z1.grad.isfinite().all()


def test_hard_negative_loss():
    b, f = 32, 128
    z1 = torch.randn(b, f).requires_grad_()
    z2 = torch.randn(b, f).requires_grad_()

    loss = hard_negative_loss_func(z1, z2, temperature=0.5, tau_plus=0.1, beta=1.0)
    initial_loss = loss.item()
    assert loss != 0

    for _ in range(20):
        loss = hard_negative_loss_func(z1, z2, temperature=0.5, tau_plus=0.1, beta=1.0)
        loss.backward()
        z1.data.add_(-0.5 * z1.grad)
        z2.data.add_(-0.5 * z2.grad)

        z1.grad = z2.grad = None

    assert loss < initial_loss
