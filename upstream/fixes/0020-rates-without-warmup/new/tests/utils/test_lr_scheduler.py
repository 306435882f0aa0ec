import pytest
import torch
from solo.utils.lr_scheduler import LinearWarmupCosineAnnealingLR


@pytest.mark.parametrize("warmup", [0, 4])
def test_every_group_has_its_own_learning_rate(warmup):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    start = 0.01 if warmup else 0.1
    scheduler = LinearWarmupCosineAnnealingLR(optimizer, warmup, 20, warmup_start_lr=start)
    for step in range(20):
        rates = [group["lr"] for group in optimizer.param_groups]
        if step >= warmup:
            assert rates[1] == pytest.approx(3 * rates[0])
        if step == warmup:
            assert rates == pytest.approx([0.1, 0.3])
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0, 0])
