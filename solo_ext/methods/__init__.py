"""Methods: modules that assemble losses, heads and state behind solo-learn's interface."""

from solo_ext.methods.debiased import Debiased
from solo_ext.methods.hard_negative import HardNegative
from solo_ext.methods.metric import Metric
from solo_ext.methods.mochi import MoCHi
from solo_ext.methods.nnclr_symmetric import NNCLRSymmetric
from solo_ext.methods.pcl import PCL
from solo_ext.methods.protocpc import ProtoCPC
from solo_ext.methods.protoseed import ProtoSEED
from solo_ext.methods.registry import METHODS
from solo_ext.methods.seed import SEED

__all__ = [
    "METHODS",
    "PCL",
    "SEED",
    "Debiased",
    "HardNegative",
    "Metric",
    "MoCHi",
    "NNCLRSymmetric",
    "ProtoCPC",
    "ProtoSEED",
]
