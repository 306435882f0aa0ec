import pytest
import torch
from solo.utils.lars import LARS

LR, DECAY, ETA, EPS = 0.5, 0.1, 0.02, 1e-8


def expected(weight, grad, clip_lr, exclude):
    """The first step with momentum, written down with Python's numbers."""

    p_norm, g_norm = weight.norm().item(), grad.norm().item()
    if p_norm and g_norm and not (exclude and weight.ndim == 1):
        rate = ETA * p_norm / (g_norm + DECAY * p_norm + EPS)
        rate = min(rate / LR, 1) if clip_lr else rate
        grad = rate * (grad + DECAY * weight)
    return weight - LR * grad


@pytest.mark.parametrize("clip_lr", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
def test_lars(clip_lr, exclude):
    weights = [torch.randn(3, 4), torch.randn(4), torch.zeros(3, 4), 1e3 * torch.randn(2, 2)]
    grads = [torch.randn(3, 4), torch.randn(4), torch.randn(3, 4), torch.randn(2, 2)]
    weights.append(torch.randn(3, 4))
    grads.append(torch.zeros(3, 4))
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    kwargs = {"momentum": 0.9, "weight_decay": DECAY, "eta": ETA, "eps": EPS}
    LARS(params, lr=LR, clip_lr=clip_lr, exclude_bias_n_norm=exclude, **kwargs).step()
    for param, weight, grad in zip(params, weights, grads):
        wanted = expected(weight, grad, clip_lr, exclude)
        assert torch.allclose(param, wanted, rtol=1e-5, atol=1e-6)


def test_lars_reads_no_value():
    # a tensor without values, which refuses what would wait for a gpu
    param = torch.nn.Parameter(torch.empty(3, 4, device="meta"))
    param.grad = torch.empty(3, 4, device="meta")
    LARS([param], lr=LR, momentum=0.9, weight_decay=DECAY, clip_lr=True).step()
