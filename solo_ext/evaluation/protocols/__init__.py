"""The protocols of ``solo-ext eval``, one per file: settings, and what they measure."""

from solo_ext.evaluation.protocols.base import (
    BackboneProtocol,
    FeatureProtocol,
    Features,
    Protocol,
    Row,
)
from solo_ext.evaluation.protocols.knn import KNN
from solo_ext.evaluation.protocols.linear import Linear

PROTOCOLS: dict[str, type[Protocol]] = {
    "knn": KNN,
    "linear": Linear,
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
