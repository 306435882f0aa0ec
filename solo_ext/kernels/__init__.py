"""Fused operations that take the place of a loss's plain form where that was measured to win.

Each makes its gradient in the forward pass, tile by tile, so that no matrix of all similarities is
held; none can be differentiated twice. Read ``tables`` first: tiles, and log-sum-exps over large
constant tables (queues, prototypes). ``nearest_rows`` looks rows up in such a table,
``mixed_logsumexp`` adds MoCHi's mixtures of its rows, ``in_batch`` contrasts rows of a batch with
each other, and ``sinkhorn`` and ``prototype_contrast`` are the two halves of ProtoCPC's step. Which
of them replaces a plain form, and when, is decided beside that form in :mod:`solo_ext.losses`.
"""
