"""Augmentation of whole batches, with torchvision's distributions."""

from solo_ext.data.batch_augment.augment import BatchAugment

__all__ = ["BatchAugment"]
