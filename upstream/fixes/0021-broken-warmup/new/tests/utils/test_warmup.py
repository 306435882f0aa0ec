import pytest
import torch
from solo.utils.lr_scheduler import LinearWarmupCosineAnnealingLR


@pytest.mark.parametrize("warmup", [0.5, 1.5, 3.3, 4, 4 + 1e-9])
def test_a_warmup_ends_at_the_learning_rate(warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = LinearWarmupCosineAnnealingLR(optimizer, warmup, 20, warmup_start_lr=0.01)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0.01
    assert max(rates) == pytest.approx(0.1)
    assert rates.index(max(rates)) <= warmup + 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
