import math

import torch
import torch.nn.functional as F
from solo.utils.misc import gather, get_rank


def hard_negative_loss_func(
    z1: torch.Tensor,
    z2: torch.Tensor,
    temperature: float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 1.0,
) -> torch.Tensor:
    """Computes the contrastive loss with debiased and hard negatives of
    https://arxiv.org/abs/2010.04592 given batches of projected features z1 from view 1 and z2
    from view 2. With beta = 0, it is the loss of https://arxiv.org/abs/2007.00224 and with
    beta = tau_plus = 0, it is SimCLR's.

    Args:
        z1 (torch.Tensor): NxD Tensor containing projected features from view 1.
        z2 (torch.Tensor): NxD Tensor containing projected features from view 2.
        temperature (float, optional): temperature for the similarities. tau_plus = 0.1 was tuned
            for 0.5: for much lower temperatures, most estimates are clamped to their minimum and
            the negatives have no gradient. Defaults to 0.5.
        tau_plus (float, optional): probability that a negative is of the same class as the anchor.
            Defaults to 0.1.
        beta (float, optional): how much more similar negatives weigh more. Defaults to 1.0.

    Returns:
        torch.Tensor: hard negative loss.
    """

    z1 = F.normalize(z1, dim=-1)
    z2 = F.normalize(z2, dim=-1)
    z = torch.cat((z1, z2))
    gathered_z = torch.cat((gather(z1), gather(z2)))

    sim = torch.einsum("if, jf -> ij", z, gathered_z).float() / temperature
    pos = torch.sum(z1 * z2, dim=1).float().repeat(2) / temperature

    # all other images are negatives, with both of their views
    b, num_images = z1.size(0), gathered_z.size(0) // 2
    indexes = (torch.arange(b, device=z.device) + b * get_rank()).repeat(2)
    gathered_indexes = torch.arange(num_images, device=z.device).repeat(2)
    own = indexes.unsqueeze(1) == gathered_indexes.unsqueeze(0)
    num_neg = 2 * num_images - 2

    # log of the mean of exp(sim) over the negatives, which are weighted with exp(beta * sim)
    log_neg = torch.logsumexp(((1 + beta) * sim).masked_fill(own, -math.inf), dim=1)
    log_neg = log_neg - torch.logsumexp((beta * sim).masked_fill(own, -math.inf), dim=1)

    # from here on, everything is divided by exp(shift) so that it does not overflow
    shift = torch.maximum(log_neg, pos).detach()
    neg = torch.exp(log_neg - shift)
    pos = pos - shift

    # remove what is expected to come from negatives of the same class as the anchor
    neg = (neg - tau_plus * torch.exp(pos)) / (1 - tau_plus)
    neg = torch.maximum(neg, torch.exp(-1 / temperature - shift))

    return torch.mean(torch.log(torch.exp(pos) + num_neg * neg) - pos)
