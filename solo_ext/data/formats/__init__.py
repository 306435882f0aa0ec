"""Data sets by how they are kept, each a sized, indexable collection of (PIL image, target)."""
