from typing import Sequence

import torch
import torch.nn.functional as F


def pcl_loss_func(
    query: torch.Tensor,
    prototypes: Sequence[torch.Tensor],
    concentrations: Sequence[torch.Tensor],
    assignments: torch.Tensor,
) -> torch.Tensor:
    """Computes PCL's ProtoNCE loss given a batch of queries and the prototypes of several
    clusterings.

    Args:
        query (torch.Tensor): NxD Tensor containing the queries.
        prototypes (Sequence[torch.Tensor]): KxD Tensor of prototypes of each clustering.
        concentrations (Sequence[torch.Tensor]): K concentrations of each clustering, the
            temperatures of its prototypes.
        assignments (torch.Tensor): PxN Tensor containing the clusters of the queries in each of P
            clusterings. Queries with -1 are ignored.

    Returns:
        torch.Tensor: PCL loss.
    """

    loss = 0
    for centroids, temperatures, targets in zip(prototypes, concentrations, assignments):
        logits = torch.einsum("nc,kc->nk", [query, centroids]) / temperatures
        total = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        loss += total / (targets != -1).sum().clamp(min=1)
    return loss / len(prototypes)
