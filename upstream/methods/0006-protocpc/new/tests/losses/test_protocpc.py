import math

import torch
import torch.nn.functional as F
from solo.losses import ProtoCPCLoss, protocpc_loss_func
from solo.utils.sinkhorn_knopp import SinkhornKnopp


def test_protocpc_loss_by_hand():
    student = torch.tensor([[math.log(2), 0.0]])
    assignments, prior = torch.tensor([[0.75, 0.25]]), torch.tensor([1.5, 0.5])
    loss = protocpc_loss_func(student, assignments, prior, temperature=1.0)
    torch.testing.assert_close(loss, torch.tensor(math.log(3.5) - 0.75 * math.log(2)))


def test_protocpc_loss_contains_cross_entropy():
    student, assignments = torch.rand(8, 20), torch.randn(8, 20).softmax(dim=1)
    loss = protocpc_loss_func(student, assignments, torch.ones(20), temperature=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(student / 0.1, assignments))


def test_protocpc_prior_contains_the_batch():
    teacher = [torch.rand(8, 20), torch.rand(8, 20)]
    loss_func = ProtoCPCLoss(20, prior_momentum=0.9)
    loss = loss_func(teacher, teacher)

    assignments = [SinkhornKnopp(3, 0.04)(p) for p in teacher]
    prior = 0.9 + 0.1 * 20 * torch.cat(assignments).mean(dim=0)
    torch.testing.assert_close(loss_func.prior, prior)
    torch.testing.assert_close(prior.sum(), torch.tensor(20.0))
    assert prior.std() > 0

    # each view predicts the other, or itself
    expected = [protocpc_loss_func(teacher[1 - v], assignments[v], prior) for v in range(2)]
    torch.testing.assert_close(loss, sum(expected) / 2)
    loss_func.prior.fill_(1)
    expected = [protocpc_loss_func(teacher[v], assignments[v], prior) for v in range(2)]
    torch.testing.assert_close(loss_func(teacher, teacher, same_view=True), sum(expected) / 2)


def test_protocpc_loss():
    b, f, k = 32, 128, 64
    student = torch.randn(2, b, f).requires_grad_()
    prototypes = F.normalize(torch.randn(f, k), dim=0)
    teacher = F.normalize(torch.randn(2, b, f), dim=-1) @ prototypes
    loss_func = ProtoCPCLoss(k)

    def compute_loss():
        return loss_func(list(F.normalize(student, dim=-1) @ prototypes), list(teacher))

    loss = compute_loss()
    initial_loss = loss.item()
    assert loss != 0

    for _ in range(20):
        loss = compute_loss()
        loss.backward()
        student.data.add_(-0.5 * student.grad)

        student.grad = None

    assert loss < initial_loss
