"""Learnable prototypes, their prior, and balanced assignments to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.distributed import sum_over_ranks
from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.dispatch import tile_rows, tiles_of
from solo_ext.kernels.sinkhorn import assign
from solo_ext.losses.protocpc import updated_prior
from solo_ext.memory.state import State


class Prototypes(nn.Module):
    """Learnable unit directions, random at first.

    Rows are rescaled to unit length in place after each optimiser step, as in SwAV, rather than by
    weight normalisation in the forward pass. So the loss reads the parameter itself, and gradients
    are not divided by a row's length, which would grow from step to step.

    Attributes:
        weight: (K, D).

    Args:
        num_prototypes: K.
        dim: D.

    Example:
        >>> prototypes = Prototypes(10, dim=4)
        >>> prototypes(F.normalize(torch.randn(3, 4), dim=1)).shape
        torch.Size([3, 10])
        >>> bool(torch.allclose(prototypes.weight.norm(dim=1), torch.ones(10)))
        True
    """

    def __init__(self, num_prototypes: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_prototypes, dim))
        self.normalize_()

    @classmethod
    def from_rows(cls, rows: Tensor) -> Self:
        """Prototypes that start in the directions of rows (K, D), a teacher's for example.

        Of a layer with weight normalisation, pass ``weight_v``: ``weight_g`` only changes lengths.
        """
        # Build on the meta device: a random initialisation would advance the global generator.
        with torch.device("meta"):
            made = cls(*rows.shape)
        made.weight = nn.Parameter(rows.detach().clone())
        made.normalize_()
        return made

    @torch.no_grad()
    def normalize_(self) -> None:
        """Rescales the rows to unit length in place; call it after each optimiser step."""
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        self.weight.div_(length.clamp(min=torch.finfo(length.dtype).tiny))

    def forward(self, x: Tensor) -> Tensor:
        """Cosines (N, K) of unit rows (N, D) with the prototypes."""
        return F.linear(x, self.weight)


class PrototypePrior(State):
    """Running mean of the teacher's prototype probabilities, times K.

    ``q <- m q + (1 - m) K mean_i p_i`` (Eq. 4). The prior starts uniform, and stays in fp32 also
    under autocast and in modules of lower precision. A step's loss uses the value from
    :meth:`peek`, which changes nothing; after the optimiser step :meth:`commit_` or
    :meth:`update_` stores it.

    Attributes:
        value: (K,), sums to K.

    Args:
        num_prototypes: K.
        momentum: m in [0, 1]; with 0 the prior is that of the last batch alone.

    Raises:
        ValueError: the momentum is not in [0, 1].

    Example:
        >>> prior = PrototypePrior(2, momentum=0.5)
        >>> probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> prior.peek(probs), prior.value
        (tensor([1.5000, 0.5000]), tensor([1., 1.]))
        >>> prior.update_(probs)
        >>> prior.value
        tensor([1.5000, 0.5000])

    Source:
        Lee, 2021, openreview 8la28hZOwug, Eq. 4.
    """

    value: Tensor

    def __init__(self, num_prototypes: int, momentum: float = 0.9) -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum={momentum}: must be in [0, 1]; the paper uses 0.9")
        self.momentum = momentum
        self.register_buffer("value", torch.ones(num_prototypes))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = self.value
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if torch.finfo(self.value.dtype).bits < 32:
            # Keep fp32: half precision would round small entries to zero.
            self.value = held.to(self.value.device)
        return self

    @torch.no_grad()
    def peek(self, teacher_probs: Tensor) -> Tensor:
        """Returns the value (K,) updated by this batch, without storing it.

        Args:
            teacher_probs: (N, K) rows of local samples that sum to 1; the mean is over the samples
                of all ranks, whose N may differ.

        Raises:
            ValueError: the shape does not fit.
        """
        if teacher_probs.ndim != 2 or teacher_probs.shape[1:] != self.value.shape:
            raise ValueError(
                f"teacher_probs must be (N, {len(self.value)}), got {tuple(teacher_probs.shape)}"
            )
        dtype = torch.promote_types(teacher_probs.dtype, torch.float32)
        total = teacher_probs.sum(0, dtype=dtype)
        count = total.new_full((1,), teacher_probs.shape[0])
        total = sum_over_ranks(torch.cat((total, count)))
        return updated_prior(self.value, total[:-1] / total[-1], self.momentum)

    @torch.no_grad()
    def commit_(self, value: Tensor) -> None:
        """Stores a value (K,) from :meth:`peek` or a step's loss, the same on every rank."""
        self.value.copy_(value)

    def update_(self, teacher_probs: Tensor) -> None:
        """Calls :meth:`peek` and :meth:`commit_`."""
        self.commit_(self.peek(teacher_probs))


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float = 0.05, iterations: int = 3, *, unit: bool = False
) -> Tensor:
    """Assignments that give all prototypes nearly the same mass, by Sinkhorn-Knopp.

    ``Q = diag(u) exp(scores / epsilon) diag(v)`` (Eq. 5). Starting from u = 1, each
    iteration chooses v so that every prototype has mass N / K over the batch, and then u so that
    every sample has mass 1: rows sum to 1, columns nearly to N / K. The batch is that of all
    ranks, whose N may differ. No scores and no epsilon cause an overflow. The result has no
    gradient.

    Args:
        scores: (N, K) of local samples with prototypes, higher is closer; fp64 is kept, all other
            dtypes are computed and returned in fp32.
        epsilon: above 0; the lower it is, the closer each row is to one-hot.
        iterations: 1 or more.
        unit: whether all scores are known to lie in [-1, 1], as cosines do; this saves a pass over
            them unless epsilon is below 0.025.

    Returns:
        (N, K) probabilities.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> q = sinkhorn(torch.tensor([[1.0, 0.0], [1.0, 0.2]]))
        >>> q.argmax(1), bool(torch.allclose(q.sum(1), torch.ones(2)))
        (tensor([0, 1]), True)

    Source:
        Caron et al., NeurIPS 2020, arXiv 2006.09882; Cuturi, NeurIPS 2013, arXiv 1306.0895.
    """
    if scores.ndim != 2:
        raise ValueError(f"scores must be (N, K), got {tuple(scores.shape)}")
    if epsilon <= 0:
        raise ValueError(f"epsilon={epsilon}: must be above 0; SwAV uses 0.05")
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: must be 1 or more; SwAV uses 3")
    dtype = torch.promote_types(scores.dtype, torch.float32)

    def logits(rows: slice, columns: slice) -> Tensor:
        return scores[rows, columns].to(dtype) * (1 / epsilon)

    with full_precision_products(scores.device):
        shape = scores.shape[0], scores.shape[1]
        bound = 1 / epsilon if unit else None
        like = scores.new_empty(0, dtype=dtype)
        found = assign(logits, shape, like, iterations, bound=bound)
        # In blocks that fit the cache, the matrix is read from memory once, not twice.
        for part in tiles_of(len(scores), tile_rows(like, scores.shape[1], 4)):
            found.matrix[part].mul_(found.columns).mul_(found.rows[part].unsqueeze(1))
        return found.matrix
