import torch
import torch.nn.functional as F
from solo.losses import pcl_loss_func


def clusterings(b, f, sizes=(10, 25)):
    prototypes = [F.normalize(torch.randn(k, f), dim=-1) for k in sizes]
    concentrations = [0.1 + torch.rand(k) for k in sizes]
    assignments = torch.stack([torch.randint(k, (b,)) for k in sizes])
    return prototypes, concentrations, assignments


def test_pcl_loss_divides_each_logit_by_the_concentration_of_its_prototype():
    query = F.normalize(torch.randn(8, 16), dim=-1)
    prototypes, concentrations, assignments = clusterings(8, 16)
    expected = []
    for c, phi, s in zip(prototypes, concentrations, assignments):
        for i in range(8):
            scores = [torch.exp(query[i] @ c[j] / phi[j]) for j in range(len(c))]
            expected.append(-torch.log(scores[s[i]] / sum(scores)))
    loss = pcl_loss_func(query, prototypes, concentrations, assignments)
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_pcl_loss_ignores_samples_without_a_cluster():
    query = F.normalize(torch.randn(8, 16), dim=-1)
    prototypes, concentrations, assignments = clusterings(8, 16)
    known = pcl_loss_func(query[:5], prototypes, concentrations, assignments[:, :5])
    assignments[:, 5:] = -1
    loss = pcl_loss_func(query, prototypes, concentrations, assignments)
    torch.testing.assert_close(loss, known)

    assignments[:] = -1
    assert pcl_loss_func(query, prototypes, concentrations, assignments) == 0


def test_pcl_loss():
    b, f = 32, 128
    query = torch.randn(b, f).requires_grad_()
    clusters = clusterings(b, f)

    loss = pcl_loss_func(query, *clusters)
    initial_loss = loss.item()
    assert loss != 0

    for _ in range(20):
        loss = pcl_loss_func(query, *clusters)
        loss.backward()
        query.data.add_(-0.5 * query.grad)

        query.grad = None

    assert loss < initial_loss
