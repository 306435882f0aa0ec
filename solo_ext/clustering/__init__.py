"""Euclidean k-means, and PCL's E-step.

k-means runs on torch, where the search for the nearest means can be flash-kmeans' (on CUDA) or one
in groups of means; or on faiss, in one process.

Read in this order: :mod:`~solo_ext.clustering.e_step` is PCL's E-step, with the concentration of
clusters; :mod:`~solo_ext.clustering.k_means` has initial means and the final assignment;
:mod:`~solo_ext.clustering.lloyd` has Lloyd's iterations with the search for the nearest means, and
:mod:`~solo_ext.clustering.hierarchical` a faster search for thousands of means;
:mod:`~solo_ext.clustering.relocation` moves means out of local optima between iterations;
:mod:`~solo_ext.clustering.rows` reads rows that are spread over ranks and sums them without
rounding; :mod:`~solo_ext.clustering.backends` calls other implementations.
"""

from solo_ext.clustering.backends import resolve_backend
from solo_ext.clustering.e_step import Granularity, cluster_concentration, e_step
from solo_ext.clustering.k_means import Clustering, kmeans, multi_granularity_kmeans

__all__ = [
    "Clustering",
    "Granularity",
    "cluster_concentration",
    "e_step",
    "kmeans",
    "multi_granularity_kmeans",
    "resolve_backend",
]
