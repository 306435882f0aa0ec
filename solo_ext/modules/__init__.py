"""Building blocks shared by the methods: heads, queues, prototypes, metrics."""

from solo_ext.modules.prototype_prior import PrototypePrior
from solo_ext.modules.prototypes import Prototypes
from solo_ext.modules.sinkhorn import sinkhorn

__all__ = ["PrototypePrior", "Prototypes", "sinkhorn"]
