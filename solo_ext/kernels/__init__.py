"""Fused operations that replace a loss's plain form where that was measured to be faster.

``dispatch`` chooses the form of every operation: the plain one; tiles, which compute the gradient
in the forward pass, so that the matrix of all similarities is never held and nothing can be
differentiated twice; or a Triton kernel for GPUs. Read ``tables`` first: log-sum-exps over large
constant tables (queues, prototypes), in their plain form and tile by tile.
``nearest_rows`` looks rows up in such a table, ``mixed_logsumexp`` adds MoCHi's mixtures of its
rows, ``in_batch`` contrasts rows of a batch with each other, and ``sinkhorn`` and
``prototype_contrast`` are the two halves of ProtoCPC's step. The Triton kernels,
``fused_logsumexp`` and ``fused_nearest``, are further forms of ``tables`` and ``nearest_rows``.
"""
