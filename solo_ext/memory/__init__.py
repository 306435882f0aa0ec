"""State of methods besides the backbone: queues, banks, prototypes, priors, teachers, and heads.

Read in this order: :mod:`~solo_ext.memory.state`, how buffers stay out of DDP's broadcast, are
split between ranks by sample, and are restored from a checkpoint;
:mod:`~solo_ext.memory.features`, queue, support set and bank;
:mod:`~solo_ext.memory.clusters`, prototypes from a clustering;
:mod:`~solo_ext.memory.prototypes`, learnable prototypes, their prior, and Sinkhorn-Knopp;
:mod:`~solo_ext.memory.heads`; :mod:`~solo_ext.memory.teacher`; :mod:`~solo_ext.memory.knn`, which
the host's validation and the evaluation share.
"""

from solo_ext.memory.prototypes import PrototypePrior, Prototypes, sinkhorn

__all__ = ["PrototypePrior", "Prototypes", "sinkhorn"]
