"""Euclidean k-means, and the E-step on it.

On torch, with flash-kmeans' search for nearest means on CUDA or one in groups of means, or in one
process on faiss.

Read in this order: :mod:`~solo_ext.clustering.e_step` is PCL's E-step, with the concentration of
clusters; :mod:`~solo_ext.clustering.k_means` has starts and the final assignment;
:mod:`~solo_ext.clustering.lloyd` Lloyd's iterations with the search for the nearest means, and
:mod:`~solo_ext.clustering.hierarchical` a shorter one for thousands of means;
:mod:`~solo_ext.clustering.relocation` is what a warm start does between iterations;
:mod:`~solo_ext.clustering.rows` spreads rows over ranks and sums them without rounding;
:mod:`~solo_ext.clustering.backends` calls other implementations.
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
