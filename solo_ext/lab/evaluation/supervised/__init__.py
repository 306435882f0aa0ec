"""Training with labels: a classifier on a frozen backbone, or the whole network."""
