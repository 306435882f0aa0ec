"""Readers of data sets by format, each a sized, indexable collection of (PIL image, target)."""
