"""Trained networks out of run directories, published checkpoints and libraries."""
