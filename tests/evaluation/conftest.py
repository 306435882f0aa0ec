"""Features of real images."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from solo_ext.evaluation.protocols import Features


@pytest.fixture(scope="session")
def digits() -> Features:
    """Pixels of scikit-learn's digits: 1,000 images to train on, 797 to test."""
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data).float(), torch.from_numpy(bunch.target).long()
    return Features(x[:1000], y[:1000], x[1000:], y[1000:], num_classes=10)
