"""Data sets, augmentation and loading; reproducible for any number of workers."""
