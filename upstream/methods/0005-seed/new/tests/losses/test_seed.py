import torch
import torch.nn.functional as F
from solo.losses import seed_loss_func


def inputs(b=8, f=16, k=50):
    student, teacher = F.normalize(torch.randn(2, b, f), dim=-1).unbind()
    return student, teacher, F.normalize(torch.randn(k, f), dim=-1)


def test_seed_loss_is_that_of_the_paper():
    student, teacher, queue = inputs()
    expected = []
    for i in range(8):
        rows = torch.cat([teacher[i : i + 1], queue])
        target = torch.softmax(rows @ teacher[i] / 0.05, dim=0)
        expected.append(-(target * torch.log_softmax(rows @ student[i] / 0.2, dim=0)).sum())
    loss = seed_loss_func(student, teacher, queue, 0.2, 0.05)
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_seed_loss_with_a_cold_teacher_is_info_nce():
    student, teacher, queue = inputs()
    logits = torch.cat([(student * teacher).sum(1, keepdim=True), student @ queue.T], dim=1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(8).long())
    torch.testing.assert_close(seed_loss_func(student, teacher, queue, 0.2, 1e-4), expected)


def test_seed_loss():
    b, f, q = 32, 128, 15000
    student = torch.randn(b, f).requires_grad_()
    teacher = F.normalize(torch.randn(b, f), dim=-1)
    queue = F.normalize(torch.randn(q, f), dim=-1)

    loss = seed_loss_func(student, teacher, queue)
    initial_loss = loss.item()
    assert loss != 0

    for _ in range(20):
        loss = seed_loss_func(student, teacher, queue)
        loss.backward()
        student.data.add_(-0.5 * student.grad)

        student.grad = None

    assert loss < initial_loss
