"""Log-sum-exp over a queue and over mixtures of its hardest rows, which are never computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import once_differentiable, tile_rows, tiles_of
from solo_ext.kernels.tables import exclude_ids


class MixDraws(NamedTuple):
    """Indices and coefficients of MoCHi's mixtures for each query.

    An index is a rank among the query's hardest negatives; 0 is the hardest.

    Attributes:
        pair_indices: (N, s, 2) integers, the two negatives of each mixture.
        alpha: (N, s) in (0, 1), the coefficient of the first one.
        single_indices: (N, s') integers, the negative that is mixed with the query.
        beta: (N, s') in (0, 0.5), the coefficient of the query.

    Example:
        >>> MixDraws(*(torch.zeros(4, *s) for s in ((5, 2), (5,), (3,), (3,)))).alpha.shape
        torch.Size([4, 5])
    """

    pair_indices: Tensor
    alpha: Tensor
    single_indices: Tensor
    beta: Tensor


class MixedLogSumExp(NamedTuple):
    """Result of :func:`mixed_logsumexp`.

    Attributes:
        lse: (E, N) log-sum-exps.
        hardest: (N,) mean similarity of the hardest rows, without gradient.
        mixed: (N,) mean similarity of the mixtures, without gradient.

    Example:
        >>> pair, none = torch.zeros(4, 1, 2).long(), (torch.zeros(4, 0).long(), torch.zeros(4, 0))
        >>> draws = MixDraws(pair, torch.full((4, 1), 0.5), *none)
        >>> found = mixed_logsumexp(torch.eye(4), torch.eye(4), 5.0, draws, num_hard=1)
        >>> found.lse.shape, found.hardest
        (torch.Size([1, 4]), tensor([1., 1., 1., 1.]))
    """

    lse: Tensor
    hardest: Tensor
    mixed: Tensor


def mixed_logsumexp(
    query: Tensor,
    table: Tensor,
    inverse_temperature: float,
    draws: MixDraws,
    num_hard: int,
    powers: Sequence[float] = (1.0,),
    *,
    excluded_columns: Tensor | None = None,
    query_ids: Tensor | None = None,
    table_ids: Tensor | None = None,
    with_table: bool = True,
    ranked: bool = True,
) -> MixedLogSumExp:
    """Log-sum-exp over all rows of a table and over normalised mixtures of its hardest rows.

    A mixture's similarity follows from dot products: that of ``(alpha n_i + (1 - alpha) n_j) /
    |.|`` is ``(alpha q.n_i + (1 - alpha) q.n_j) / |.|``, and ``|.|^2 = 1 - 2 alpha
    (1 - alpha) (1 - n_i.n_j)``; likewise with the query in place of n_i. Mixtures are constants,
    so the query's gradient is a weighted sum of the table's rows and of the mixtures; the tiled
    form computes it in the forward pass.

    Args:
        query: (N, D) unit rows, fp32 or fp64; the only input that gets a gradient.
        table: (K, D) unit rows, of the query's dtype, K at least ``num_hard`` + m.
        inverse_temperature: factor of the similarities.
        draws: indices and coefficients of the mixtures, at least one for each query.
        num_hard: number of the most similar rows that are mixed.
        powers: (E,) as in :func:`solo_ext.kernels.tables.table_logsumexp`.
        excluded_columns: (N, m) indices of rows of the table that are not negatives of the query;
            none by default.
        query_ids: (N,) or (N, m) integers; rows with one of the query's ids are not its negatives
            either.
        table_ids: (K,) ids of the rows; only together with ``query_ids``.
        with_table: whether to sum the table's rows too, or only the mixtures.
        ranked: whether index 0 must be the hardest row, which takes a sort; otherwise the hardest
            rows are in any order, which is enough for random indices.

    Example:
        The mixture of a row with itself is that row:

        >>> query, table = (F.normalize(torch.randn(n, 8)) for n in (4, 20))
        >>> hardest = torch.zeros(4, 1, 2).long(), torch.full((4, 1), 0.5)
        >>> none = torch.zeros(4, 0).long(), torch.zeros(4, 0)
        >>> found = mixed_logsumexp(query, table, 5.0, MixDraws(*hardest, *none), num_hard=3)
        >>> logits = 5.0 * query @ table.T
        >>> logits = torch.cat((logits, logits.amax(1, keepdim=True)), dim=1)
        >>> found.lse[0].allclose(logits.logsumexp(1), rtol=1e-4)
        True
    """
    draws = draws._replace(alpha=draws.alpha.to(query.dtype), beta=draws.beta.to(query.dtype))
    excluded, table = (excluded_columns, query_ids, table_ids), table.detach()

    def plain(query: Tensor) -> MixedLogSumExp:
        logits = _cosines(query, table, *excluded)
        with torch.no_grad():
            values, top = logits.topk(num_hard, dim=1, sorted=ranked)
            cosine, columns, shares, of_query = _mix(logits, table, top, draws)
        pairs = draws.alpha.shape[1]
        # Mixtures are constants, also the query as a part of a mixture: it is detached.
        parts = logits.gather(1, columns) * shares
        of_pairs = parts[:, : 2 * pairs].reshape(len(query), pairs, 2).sum(2)
        own = of_query * torch.linalg.vecdot(query, query.detach()).unsqueeze(1)
        mixtures = torch.cat((of_pairs, parts[:, 2 * pairs :] + own), 1)
        every = torch.cat((logits, mixtures), 1) if with_table else mixtures
        lse = torch.stack([(every * (inverse_temperature * p)).logsumexp(1) for p in powers])
        return MixedLogSumExp(lse, values.mean(1), cosine.mean(1))

    def tiles(query: Tensor) -> MixedLogSumExp:
        widest = max(table.shape[0], draws.alpha.shape[1] * query.shape[1])
        tile = tile_rows(query, widest, 8, share=6)
        query = query if torch.is_grad_enabled() else query.detach()
        settings = inverse_temperature, num_hard, tuple(powers), with_table, ranked, tile
        return MixedLogSumExp(*_Mixed.apply(query, table, *excluded, *draws, *settings))  # type: ignore[no-untyped-call]

    forms: dict[dispatch.Form, Callable[..., MixedLogSumExp]] = {"plain": plain, "tiles": tiles}
    counts = num_hard, draws.alpha.shape[1], draws.beta.shape[1], len(powers)
    details = *counts, with_table, ranked, *(x is None for x in excluded)
    return dispatch.run("mixed_logsumexp", forms, [query], len(table), *details)


def _cosines(
    query: Tensor,
    table: Tensor,
    excluded_columns: Tensor | None,
    query_ids: Tensor | None,
    table_ids: Tensor | None,
) -> Tensor:
    """Similarities (N, K), minus infinity where a row is not a negative of the query."""
    logits = query @ table.T
    if excluded_columns is not None:
        logits = logits.scatter_(1, excluded_columns, float("-inf"))
    if query_ids is not None and table_ids is not None:
        logits = exclude_ids(logits, query_ids, table_ids)
    return logits


def _mix(
    logits: Tensor, table: Tensor, top: Tensor, draws: MixDraws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosines of the mixtures (n, s + s'), and their parts with coefficients.

    The parts are rows of the table: indices and coefficients in the normalised mixture,
    (n, 2 s + s') each; and the query: coefficients (n, s').
    """
    pair_indices, alpha, single_indices, beta = draws
    count, pairs = alpha.shape
    columns = top.gather(1, pair_indices.flatten(1).long())
    first, second = logits.gather(1, columns).view(count, pairs, 2).unbind(2)
    # For unit rows |alpha n_i + (1 - alpha) n_j|^2 = 1 - alpha (1 - alpha) |n_i - n_j|^2, and
    # |n_i - n_j|^2 = 4 - |n_i + n_j|^2. embedding_bag and vector_norm read the rows once, without
    # the copies that gathering and multiplying would make.
    both = F.embedding_bag(columns.view(-1, 2), table, mode="sum")
    apart = (4 - torch.linalg.vector_norm(both, dim=1).square()).view(count, pairs)
    other = 1 - alpha
    # Opposite rows mixed half and half cancel out: their similarity is then 0.
    tiny = torch.finfo(logits.dtype).eps
    length = (1 - alpha * other * apart).clamp_(min=tiny).rsqrt_()
    alpha, other = alpha * length, other * length

    single = top.gather(1, single_indices.long())
    near = logits.gather(1, single)
    rest = 1 - beta
    # The squared length is above 0 because beta < 1/2: the length is at least 1 - 2 beta.
    length = torch.rsub(beta * rest * (1 - near), 1, alpha=2).clamp_(min=tiny).rsqrt_()
    beta, rest = beta * length, rest * length
    cosine = torch.cat((alpha * first + other * second, beta + rest * near), 1)
    shares = torch.cat((torch.stack((alpha, other), 2).flatten(1), rest), 1)
    return cosine, torch.cat((columns, single), 1), shares, beta


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        table: Tensor,
        excluded_columns: Tensor | None,
        query_ids: Tensor | None,
        table_ids: Tensor | None,
        pair_indices: Tensor,
        alpha: Tensor,
        single_indices: Tensor,
        beta: Tensor,
        inverse_temperature: float,
        num_hard: int,
        powers: tuple[float, ...],
        with_table: bool,
        ranked: bool,
        tile: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted, pairs = ctx.needs_input_grad[0], alpha.shape[1]
        draws = MixDraws(pair_indices, alpha, single_indices, beta)
        masses, means, hardest, mixed = [], [], [], []
        for part in tiles_of(len(query), tile):
            rows = query[part]
            own_columns, own_ids = (
                None if x is None else x[part] for x in (excluded_columns, query_ids)
            )
            logits = _cosines(rows, table, own_columns, own_ids, table_ids)
            values, top = logits.topk(num_hard, dim=1, sorted=ranked)
            own = MixDraws(*(x[part] for x in draws))
            cosine, columns, shares, of_query = _mix(logits, table, top, own)
            hardest.append(values.mean(1))
            mixed.append(cosine.mean(1))
            largest = torch.maximum(values.amax(1), cosine.amax(1)).unsqueeze(1)
            for e, power in enumerate(powers):
                factor = inverse_temperature * power
                # Overwrite the logits only for the last power: nothing needs them afterwards.
                weights = logits if e == len(powers) - 1 else logits.clone()
                if with_table:
                    weights.sub_(largest).mul_(factor).exp_()
                else:
                    weights.zero_()
                mixtures = ((cosine - largest) * factor).exp_()
                total = weights.sum(1) + mixtures.sum(1)
                masses.append(total.log() + largest.squeeze(1) * factor)
                if wanted:
                    of_pairs, of_singles = mixtures[:, :pairs], mixtures[:, pairs:]
                    spread = torch.cat((of_pairs.repeat_interleave(2, 1), of_singles), 1)
                    weights.scatter_add_(1, columns, spread * shares)
                    towards = (of_singles * of_query).sum(1, keepdim=True)
                    mean = (weights @ table).add_(towards * rows)
                    means.append(mean.mul_((factor / total).unsqueeze(1)))

        def by_power(parts: list[Tensor]) -> Tensor:
            """Joins the blocks of each power: a list by block and power becomes (E, N, ...)."""
            number = len(powers)
            return torch.stack([torch.cat(parts[e::number]) for e in range(number)])

        ctx.means = by_power(means) if wanted else None
        found = by_power(masses), torch.cat(hardest), torch.cat(mixed)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        to_query = None if ctx.means is None else (grad.unsqueeze(2) * ctx.means).sum(0)
        return to_query, *[None] * 14
