import torch
import torch.nn.functional as F


@torch.no_grad()
def mix_hard_negatives(
    query: torch.Tensor,
    queue: torch.Tensor,
    num_hard: int,
    num_pair_mixes: int,
    num_query_mixes: int,
) -> torch.Tensor:
    """Creates synthetic negatives for each query from its hardest negatives in the queue. They have
    no gradient.

    Args:
        query (torch.Tensor): NxD Tensor containing the queries.
        queue (torch.Tensor): DxK Tensor containing the negatives.
        num_hard (int): number of negatives most similar to the query that are mixed.
        num_pair_mixes (int): number of mixtures of two of them.
        num_query_mixes (int): number of mixtures of one of them with the query.

    Returns:
        torch.Tensor: Nx(num_pair_mixes + num_query_mixes)xD Tensor of normalized negatives.
    """

    n, device = query.size(0), query.device
    hardest = torch.einsum("nc,ck->nk", [query, queue]).topk(num_hard, dim=1).indices
    queue = queue.t()

    def pick(indexes: torch.Tensor) -> torch.Tensor:
        return queue[hardest.gather(1, indexes)]

    # convex combinations of two different hard negatives
    first = torch.randint(num_hard, (n, num_pair_mixes), device=device)
    offset = torch.randint(1, max(num_hard, 2), (n, num_pair_mixes), device=device)
    second = (first + offset) % num_hard
    alpha = torch.rand(n, num_pair_mixes, 1, device=device)
    pair_mixes = alpha * pick(first) + (1 - alpha) * pick(second)

    # convex combinations with the query, which contributes less than the negative
    single = torch.randint(num_hard, (n, num_query_mixes), device=device)
    beta = torch.rand(n, num_query_mixes, 1, device=device) / 2
    query_mixes = beta * query.unsqueeze(1) + (1 - beta) * pick(single)

    return F.normalize(torch.cat([pair_mixes, query_mixes], dim=1), dim=-1)


def mochi_loss_func(
    query: torch.Tensor,
    key: torch.Tensor,
    queue: torch.Tensor,
    temperature: float = 0.2,
    num_hard: int = 1024,
    num_pair_mixes: int = 1024,
    num_query_mixes: int = 128,
) -> torch.Tensor:
    """Computes MoCHi's loss given a batch of queries from view 1, a batch of keys from view 2 and a
    queue of past elements. Without mixtures, it is MoCo's.

    Args:
        query (torch.Tensor): NxD Tensor containing the queries from view 1.
        key (torch.Tensor): NxD Tensor containing the keys from view 2.
        queue (torch.Tensor): DxK Tensor of negative samples for the contrastive loss.
        temperature (float, optional): temperature of the softmax in the contrastive
            loss. Defaults to 0.2.
        num_hard (int, optional): number of negatives most similar to the query that are mixed.
            Defaults to 1024.
        num_pair_mixes (int, optional): number of mixtures of two of them. Defaults to 1024.
        num_query_mixes (int, optional): number of mixtures of one of them with the query.
            Defaults to 128.

    Returns:
        torch.Tensor: MoCHi loss.
    """

    synthetic = mix_hard_negatives(query, queue, num_hard, num_pair_mixes, num_query_mixes)

    pos = torch.einsum("nc,nc->n", [query, key]).unsqueeze(-1)
    neg = torch.einsum("nc,ck->nk", [query, queue])
    mixed = torch.einsum("nc,nsc->ns", [query, synthetic])
    logits = torch.cat([pos, neg, mixed], dim=1) / temperature
    targets = torch.zeros(query.size(0), device=query.device, dtype=torch.long)
    return F.cross_entropy(logits, targets)
