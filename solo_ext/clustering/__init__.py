"""Euclidean k-means on torch, faiss or flash-kmeans, and the E-step that is made of it.

Read in this order: :mod:`~solo_ext.clustering.e_step`, PCL's, with the concentration of clusters;
:mod:`~solo_ext.clustering.k_means`, starts, restarts and the last assignment;
:mod:`~solo_ext.clustering.lloyd`, the steps, and :mod:`~solo_ext.clustering.relocation`, what a
warm start does between them; :mod:`~solo_ext.clustering.backends`, other implementations of the
steps; :mod:`~solo_ext.clustering.rows`, rows over ranks and sums that round nothing;
:mod:`~solo_ext.clustering.feature_file`, rows in a file; :mod:`~solo_ext.clustering.agreement`, how
two groupings agree.
"""

from solo_ext.clustering.backends import resolve_backend
from solo_ext.clustering.e_step import Granularity, cluster_concentration, e_step
from solo_ext.clustering.feature_file import FeatureFile, Features
from solo_ext.clustering.k_means import Clustering, kmeans, multi_granularity_kmeans

__all__ = [
    "Clustering",
    "FeatureFile",
    "Features",
    "Granularity",
    "cluster_concentration",
    "e_step",
    "kmeans",
    "multi_granularity_kmeans",
    "resolve_backend",
]
