"""Fused operations that replace a loss's plain form where they were measured to be faster.

``dispatch`` chooses the form of every operation: plain; in tiles, which never hold the matrix of
all similarities, compute the gradient in the forward pass, and therefore cannot be differentiated
twice; or a Triton kernel on GPUs. Read ``tables`` first: log-sum-exps over large constant tables
(queues, prototypes), in plain form and in tiles. ``nearest_rows`` finds the nearest rows of such a
table, ``mixed_logsumexp`` adds MoCHi's mixtures of its rows, ``in_batch`` contrasts rows of a batch
with each other, and ``sinkhorn`` and ``prototype_contrast`` are the two halves of ProtoCPC's step.
``normalized`` divides rows by their lengths.
``fused_logsumexp`` and ``fused_nearest`` are the Triton kernels of ``tables`` and ``nearest_rows``.
"""
