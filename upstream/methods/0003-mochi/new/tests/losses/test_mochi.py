import torch
import torch.nn.functional as F
from solo.losses import mochi_loss_func, mocov2plus_loss_func
from solo.losses.mochi import mix_hard_negatives


def inputs(b=8, f=16, k=50):
    query, key = F.normalize(torch.randn(2, b, f), dim=-1).unbind()
    return query, key, F.normalize(torch.randn(f, k), dim=0)


def test_mochi_contains_moco():
    query, key, queue = inputs()
    loss = mochi_loss_func(query, key, queue, 0.2, 10, num_pair_mixes=0, num_query_mixes=0)
    torch.testing.assert_close(loss, mocov2plus_loss_func(query, key, queue, 0.2))


def test_mochi_adds_its_mixtures_to_the_queue():
    """Where all synthetic negatives are the single hardest one, they count as its copies."""
    query, key, queue = inputs()
    loss = mochi_loss_func(query, key, queue, 0.2, 1, num_pair_mixes=5, num_query_mixes=0)
    sim = query @ queue
    logits = torch.cat([(query * key).sum(1, keepdim=True), sim], dim=1) / 0.2
    copies = sim.max(dim=1, keepdim=True).values.repeat(1, 5) / 0.2
    logits = torch.cat([logits, copies], dim=1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.zeros(8).long()))


def test_mochi_mixes_the_hardest_negatives():
    query, _, queue = inputs(f=64)
    query.requires_grad_()
    mixed = mix_hard_negatives(query, queue, num_hard=5, num_pair_mixes=7, num_query_mixes=30)
    assert mixed.shape == (8, 37, 64) and not mixed.requires_grad
    torch.testing.assert_close(mixed.norm(dim=-1), torch.ones(8, 37))

    # every mixture is a combination of the five hardest negatives and, in the second part, of
    # the query, which has the smaller part
    hardest = (query @ queue).topk(5, dim=1).indices
    for i in range(8):
        basis = torch.cat([queue.t()[hardest[i]], query[i : i + 1].detach()])
        coefficients = torch.linalg.lstsq(basis.t(), mixed[i].t()).solution
        torch.testing.assert_close(basis.t() @ coefficients, mixed[i].t(), atol=1e-4, rtol=1e-4)
        used = coefficients > 1e-4
        assert (coefficients > -1e-4).all() and (used.sum(dim=0) <= 2).all()
        assert not used[-1, :7].any()
        assert (coefficients[-1, 7:] <= coefficients[:-1, 7:].max(dim=0).values).all()


def test_mochi_loss():
    b, f, q = 32, 128, 15000
    query = torch.randn(b, f).requires_grad_()
    key = torch.randn(b, f).requires_grad_()
    queue = torch.randn(f, q)
    kwargs = {"temperature": 0.1, "num_hard": 64, "num_pair_mixes": 64, "num_query_mixes": 16}

    loss = mochi_loss_func(query, key, queue, **kwargs)
    initial_loss = loss.item()
    assert loss != 0

    for _ in range(20):
        loss = mochi_loss_func(query, key, queue, **kwargs)
        loss.backward()
        query.data.add_(-0.5 * query.grad)
        key.data.add_(-0.5 * key.grad)

        query.grad = key.grad = None

    assert loss < initial_loss
