"""InfoNCE against a table: past keys of a queue (MoCo), or the prototypes of a clustering (PCL)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.normalized import normalized
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses.common import LOSSES, check_positive, check_table, unit_rows

Collisions = Literal["paper", "merge"]


def plain_info_nce(
    query: Tensor, positive: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """Eq. 1 of MoCo for unit rows, on the (N, 1 + K) matrix of logits; the reference.

    Example:
        >>> query, key, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 100))
        >>> plain_info_nce(query, key, queue, temperature=0.2).shape
        torch.Size([])
    """
    own = (query * positive).sum(1, keepdim=True)
    logits = torch.cat((own, query @ negatives.T), dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=query.device))


def plain_proto_nce(
    query: Tensor,
    prototypes: Tensor,
    concentration: Tensor,
    positive_ids: Tensor,
    negative_ids: Tensor | None = None,
    collisions: Collisions = "paper",
) -> Tensor:
    """The second term of PCL's Eq. 11 for unit rows, on the (N, C) logits; the reference.

    Example:
        >>> query, prototypes = (F.normalize(torch.randn(n, 8)) for n in (4, 9))
        >>> ids = torch.tensor([0, 3, 3, 8])
        >>> plain_proto_nce(query, prototypes, torch.full((9,), 0.2), ids).shape
        torch.Size([])
    """
    if negative_ids is None:
        logits = query @ prototypes.T / concentration
    else:
        columns = torch.cat((positive_ids, negative_ids))
        logits = query @ prototypes[columns].T / concentration[columns]
        if collisions == "merge":
            logits = logits.masked_fill(_repeated(columns, len(prototypes)), float("-inf"))
    own = (query * prototypes[positive_ids]).sum(-1) / concentration[positive_ids]
    return (logits.logsumexp(-1) - own).mean()


@LOSSES.register(
    "info_nce_loss_func",
    paper="Momentum Contrast for Unsupervised Visual Representation Learning",
    year=2019,
    arxiv="1911.05722",
)
def info_nce_loss_func(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float = 0.2,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of each query's positive against negatives that all queries share.

    ``-log(exp(q.k+ / T) / (exp(q.k+ / T) + sum_j exp(q.n_j / T)))``, mean over the queries
    (Eq. 1).

    Args:
        query: (N, D); normalised inside.
        positive: (N, D), row i belongs to query i; normalised inside.
        negatives: (K, D) unit rows, not normalised again; K may be 0.
        temperature: T, above 0.
        compute_dtype: dtype of the factors in products with the negatives, ``torch.bfloat16`` for
            example; fp32 by default. If given, the negatives must be constants.

    Returns:
        Scalar; a differentiable zero if there are no negatives.

    Raises:
        ValueError: shapes do not fit, the temperature is not positive, or ``compute_dtype`` is
            given with negatives that require a gradient.

    Source:
        He et al., CVPR 2020, arXiv 1911.05722; van den Oord et al., 2018, arXiv 1807.03748.

    Example:
        >>> query, key = torch.randn(4, 16), torch.randn(4, 16)
        >>> queue = F.normalize(torch.randn(1000, 16))
        >>> loss = info_nce_loss_func(query, key, queue, temperature=0.2)
        >>> query, key = (F.normalize(x) for x in (query, key))
        >>> loss.allclose(plain_info_nce(query, key, queue, temperature=0.2))
        True
    """
    query, positive = unit_rows(query=query, positive=positive)
    check_table("negatives", negatives, query)
    check_positive(temperature=temperature)
    if negatives.requires_grad:
        # The kernel would give no gradient to the negatives.
        if compute_dtype is not None:
            raise ValueError(
                f"compute_dtype={compute_dtype}: is for constant negatives; leave it out"
            )
        with full_precision_products(query.device):
            return plain_info_nce(query, positive, negatives.to(query.dtype), temperature)
    pairs = query.unsqueeze(0), positive.unsqueeze(0)
    return info_nce_terms(*pairs, [negatives], temperature, compute_dtype).squeeze(0)


def info_nce_terms(
    query: Tensor,
    positive: Tensor,
    negatives: Sequence[Tensor],
    temperature: float,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """The losses (V,) of V views, each against constant negatives of its own.

    Arguments are those of :func:`info_nce_loss_func`, except that ``query`` and ``positive``
    (V, N, D) have unit rows in full precision, and that there are (K, D) negatives for each view.

    Example:
        >>> query, key = F.normalize(torch.randn(2, 2, 4, 8), dim=-1)
        >>> queues = [F.normalize(torch.randn(100, 8)) for _ in query]
        >>> info_nce_terms(query, key, queues, temperature=0.2).shape
        torch.Size([2])
    """
    with full_precision_products(query.device):
        # A single view needs neither a split nor a copy.
        views = query.unbind() if len(query) > 1 else [query.squeeze(0)]
        found = [
            table_logsumexp(
                q, n.to(q.dtype), 1 / temperature, unit=True, compute_dtype=compute_dtype
            )[0]
            for q, n in zip(views, negatives, strict=True)
        ]
        lse = torch.cat(found) if len(found) > 1 else found[0]
        # The cross-entropy is log(1 + exp(lse - s)).
        own = (query * positive).sum(-1)
        return F.softplus(torch.sub(lse, own, alpha=1 / temperature)).mean(1)


@LOSSES.register(
    "proto_nce_loss_func",
    paper="Prototypical Contrastive Learning of Unsupervised Representations",
    year=2020,
    arxiv="2005.04966",
)
def proto_nce_loss_func(
    query: Tensor,
    prototypes: Tensor,
    concentration: Tensor,
    positive_ids: Tensor,
    negative_ids: Tensor | None = None,
    collisions: Collisions = "paper",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of each query's own prototype against other prototypes.

    ``-log(exp(q.c_s / phi_s) / sum_j exp(q.c_j / phi_j))``, s the prototype of the query, phi_j
    the concentration of prototype j, which divides its own column; mean over the queries (second
    term of Eq. 11, one clustering).

    Args:
        query: (N, D); normalised inside.
        prototypes: (K, D) unit rows, the means of the clusters; not normalised again.
        concentration: (K,), above 0.
        positive_ids: (N,) integers in [0, K), the cluster of each query.
        negative_ids: by default j runs over all K prototypes. If given, (R,), j runs over the
            prototypes of all queries of the batch, and then over these.
        collisions: with ``negative_ids``, what happens if queries share a cluster. ``paper``: the
            prototype of every other query is a negative, even if it equals the query's own, as in
            the official code; the loss of such a query is at least ln 2. ``merge``: each distinct
            prototype counts once.
        compute_dtype: dtype of the factors in products with constant prototypes,
            ``torch.bfloat16`` for example; fp32 by default.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or ``collisions`` is unknown.

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966.

    Example:
        >>> query, prototypes = (F.normalize(torch.randn(n, 8)) for n in (4, 9))
        >>> concentration, ids = torch.linspace(0.1, 0.3, 9), torch.tensor([0, 3, 3, 8])
        >>> proto_nce_loss_func(query, prototypes, concentration, ids).allclose(
        ...     plain_proto_nce(query, prototypes, concentration, ids)
        ... )
        True
    """
    if query.ndim != 2:
        raise ValueError(f"query must be (N, D), got {tuple(query.shape)}")
    tables = [prototypes], [concentration], positive_ids.unsqueeze(0)
    drawn = None if negative_ids is None else [negative_ids]
    (query,) = full_precision(query)
    unit = normalized(query).unsqueeze(0)
    losses, _ = proto_nce_terms(unit, *tables, drawn, collisions, compute_dtype)
    return losses[0]


def proto_nce_terms(
    query: Tensor,
    prototypes: Sequence[Tensor],
    concentration: Sequence[Tensor],
    positive_ids: Tensor,
    negative_ids: Sequence[Tensor] | None = None,
    collisions: Collisions = "paper",
    compute_dtype: torch.dtype | None = None,
    scaled: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The ProtoNCE losses (M,) of M clusterings, and the accuracies (M,) of the queries.

    Arguments and errors are those of :func:`proto_nce_loss_func`, except that ``query`` (V, N, D)
    has V views of N images, unit rows in full precision; ``positive_ids`` (M, N) has the clusters
    of the images, and there are prototypes, concentrations and (R,) negatives for each clustering.
    An accuracy, without gradient, is the share of queries whose own prototype has the largest
    logit.

    Args:
        scaled: prototypes divided by their concentrations, constants in the dtype of the products'
            factors, for callers that compute them once for many batches.

    Example:
        >>> query = F.normalize(torch.randn(1, 4, 8), dim=-1)
        >>> tables = [F.normalize(torch.randn(k, 8)) for k in (3, 9)]
        >>> phis, ids = [torch.full((k,), 0.2) for k in (3, 9)], torch.zeros(2, 4).long()
        >>> losses, accuracy = proto_nce_terms(query, tables, phis, ids)
        >>> losses.shape, accuracy.shape
        (torch.Size([2]), torch.Size([2]))
    """
    for table, phi in zip(prototypes, concentration, strict=True):
        check_table("prototypes", table, query)
        for name, given, shape in (
            ("concentration", phi, table.shape[:1]),
            ("positive_ids", positive_ids[0], query.shape[1:2]),
        ):
            if given.shape != shape:
                raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(given.shape)}")
    if collisions not in ("paper", "merge"):
        raise ValueError(f"collisions={collisions!r}: must be 'paper' or 'merge'")
    count = len(prototypes)
    query, *tables = full_precision(query, *prototypes, *concentration)
    negatives = [None] * count if negative_ids is None else negative_ids
    clusterings = list(zip(tables[:count], tables[count:], positive_ids, negatives, strict=True))
    with full_precision_products(query.device):
        flat = query.flatten(0, 1)
        # Logits of the queries' own prototypes, (M, V N).
        rows = torch.stack([table[ids] for table, _, ids, _ in clusterings]).unsqueeze(1)
        phis = torch.stack([phi[ids] for _, phi, ids, _ in clusterings]).unsqueeze(1)
        own = ((query * rows).sum(-1) / phis).flatten(1)
        found = []
        for m, (table, phi, positives, drawn) in enumerate(clusterings):
            columns, log_weight = None, None
            if drawn is not None:
                columns = torch.cat((positives, drawn))
                if collisions == "merge":
                    repeated = _repeated(columns, len(table))
                    log_weight = own.new_zeros(()).where(~repeated, float("-inf"))
            found.append(
                table_logsumexp(
                    flat,
                    table * (1 / phi).unsqueeze(1) if scaled is None else scaled[m],
                    1.0,
                    columns=columns,
                    log_weight=log_weight,
                    compute_dtype=compute_dtype,
                )
            )
        mass, largest = torch.cat([lse for lse, _ in found]), torch.stack([x for _, x in found])
        # Compare with a tolerance: the kernel that returns `largest` sums in another order than
        # `own`, and may round the factors.
        close = 1e-4 if compute_dtype is None else torch.finfo(compute_dtype).eps
        reached = largest - own.detach() <= close * largest.abs().clamp(min=1)
        loss = (mass - own).mean(1)
        if any(x.requires_grad for x in tables):
            # The kernel would give no gradient to prototypes and concentrations.
            loss = torch.stack([plain_proto_nce(query, *c, collisions) for c in clusterings])
        return loss, reached.mean(1, dtype=loss.dtype)


def _repeated(ids: Tensor, size: int) -> Tensor:
    """Mask (C,) of the ids that already occur at an earlier position."""
    places = torch.arange(ids.shape[0], device=ids.device)
    first = ids.new_full((size,), ids.shape[0]).scatter_reduce(0, ids, places, "amin")
    return first[ids] != places
