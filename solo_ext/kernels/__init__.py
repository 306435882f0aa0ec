"""Fused operations that replace a loss's plain form where that was measured to be faster.

Each computes its gradient in the forward pass, tile by tile, so that the matrix of all similarities
is never held; none can be differentiated twice. Read ``tables`` first: log-sum-exps over large
constant tables (queues, prototypes) in their plain form; ``tiles`` has them tile by tile.
``nearest_rows`` looks rows up in such a table, ``mixed_logsumexp`` adds MoCHi's mixtures of its
rows, ``in_batch`` contrasts rows of a batch with each other, and ``sinkhorn`` and
``prototype_contrast`` are the two halves of ProtoCPC's step. ``dispatch`` chooses between the forms
of ``tables`` and ``nearest_rows``, which have Triton kernels for GPUs besides: ``fused_logsumexp``
and ``fused_nearest``.
"""
