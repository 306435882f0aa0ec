"""Few of scikit-learn's digits, where every image costs time and few show the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from solo_ext.data import digits


def few_digits(root: Path, train: int, val: int) -> Path:
    """Has ``SOLO_EXT_DATA=root`` hold so many digits of each class, the first of all."""
    bunch = load_digits()
    places = [np.flatnonzero(bunch.target == label)[: train + val] for label in range(10)]
    kept = np.sort(np.concatenate(places))
    few = SimpleNamespace(images=bunch.images[kept], target=bunch.target[kept])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sklearn.datasets.load_digits", lambda: few)
        patch.setattr(digits, "TRAIN_PER_CLASS", train)
        for split, count in (("train", train), ("val", val)):
            folder = digits.digits_folder(split, root)
            assert {len(list(label.iterdir())) for label in folder.iterdir()} == {count}
    return root
