"""The protocols of ``solo-ext eval``, one per file: settings, and what they measure."""

from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, FeatureProtocol, Protocol, Row
from solo_ext.lab.evaluation.protocols.clustering import Clusters
from solo_ext.lab.evaluation.protocols.finetune import Finetune
from solo_ext.lab.evaluation.protocols.geometry import FeatureSpace
from solo_ext.lab.evaluation.protocols.knn import KNN
from solo_ext.lab.evaluation.protocols.linear import Linear
from solo_ext.lab.evaluation.protocols.linear_augmented import LinearAugmented
from solo_ext.lab.evaluation.protocols.linear_sgd import LinearSGD
from solo_ext.lab.evaluation.protocols.lowshot import LowShot
from solo_ext.lab.evaluation.protocols.map import FeatureMap
from solo_ext.lab.evaluation.protocols.neighbors import Neighbors
from solo_ext.lab.evaluation.protocols.retrieval import Retrieval
from solo_ext.lab.evaluation.protocols.transfer import Transfer

PROTOCOLS: dict[str, type[Protocol]] = {
    "knn": KNN,
    "linear": Linear,
    "linear_sgd": LinearSGD,
    "lowshot": LowShot,
    "clustering": Clusters,
    "retrieval": Retrieval,
    "geometry": FeatureSpace,
    "linear_augmented": LinearAugmented,
    "finetune": Finetune,
    "map": FeatureMap,
    "neighbors": Neighbors,
    "transfer": Transfer,
}
"""By the name on the command line, in the order of the report."""


def headline(protocol: str, rows: list[Row]) -> dict[str, float]:
    """The few numbers by which runs are compared, such as ``{"acc1": 87.5}``."""
    return PROTOCOLS[protocol].headline(rows)


__all__ = [
    "PROTOCOLS",
    "BackboneProtocol",
    "FeatureProtocol",
    "Features",
    "Protocol",
    "Row",
    "headline",
]
