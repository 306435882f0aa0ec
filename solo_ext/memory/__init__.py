"""Building blocks shared by the methods: heads, queues, prototypes, metrics."""

from solo_ext.memory.prototype_prior import PrototypePrior
from solo_ext.memory.prototypes import Prototypes
from solo_ext.memory.sinkhorn import sinkhorn

__all__ = ["PrototypePrior", "Prototypes", "sinkhorn"]
