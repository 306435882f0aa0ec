import torch
import torch.nn.functional as F
from solo.losses import deepclusterv2_loss_func


def test_deepclusterv2_loss():
    torch.manual_seed(0)
    outputs = torch.randn(3, 2, 8, 5, requires_grad=True)
    assignments = torch.randint(0, 5, (3, 8))

    # mean over the prototype layers, of the mean over all views and samples
    loss = deepclusterv2_loss_func(outputs, assignments, temperature=0.1)
    expected = sum(
        F.cross_entropy(outputs[h, v] / 0.1, assignments[h]) / 6 for h in range(3) for v in range(2)
    )
    assert torch.allclose(loss, expected)
    loss.backward()
    assert (outputs.grad != 0).any()

    # samples without assignment do not count
    some = assignments.clone()
    some[:, 4:] = -1
    assert torch.allclose(
        deepclusterv2_loss_func(outputs, some),
        deepclusterv2_loss_func(outputs[:, :, :4].contiguous(), assignments[:, :4]),
    )


def test_deepclusterv2_loss_without_assignments():
    outputs = torch.randn(3, 2, 8, 5, requires_grad=True)
    loss = deepclusterv2_loss_func(outputs, -torch.ones(3, 8).long())
    assert loss == 0
    loss.backward()
    assert (outputs.grad == 0).all()
