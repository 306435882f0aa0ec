"""Evaluation of frozen features."""
