"""Euclidean k-means on torch, faiss or flash-kmeans, and the concentration of its clusters."""

from solo_ext.clustering.backends import resolve_backend
from solo_ext.clustering.concentration import cluster_concentration
from solo_ext.clustering.e_step import Granularity, e_step
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
