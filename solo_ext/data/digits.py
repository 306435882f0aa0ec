"""scikit-learn's handwritten digits as a folder of real images."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from solo_ext.core.errors import UserError
from solo_ext.core.files import data_root

SIZE = 32
TRAIN_PER_CLASS = 140
"""The first 140 images of each class are for training, the others for validation."""


def add_resolvers() -> None:
    """Registers ``${solo_ext.digits:<split>}``, the digits' folder in shipped configs."""
    if not OmegaConf.has_resolver("solo_ext.digits"):
        OmegaConf.register_new_resolver("solo_ext.digits", lambda split: str(digits_folder(split)))


def digits_folder(split: str, root: Path | None = None) -> Path:
    """Folder of the digits, ``<split>/<class>/<number>.png``; written on first use.

    The 1,797 images of 8 x 8 pixels (16 grey levels) come with scikit-learn (Alpaydin and
    Kaynak, UCI 1998); they are scaled to 32 x 32 pixels.

    Args:
        split: ``train`` (140 images of each class) or ``val`` (the others, 397).
        root: parent folder; :func:`solo_ext.core.files.data_root` by default.

    Raises:
        UserError: there is no such split, or the folder exists without it.
    """
    folder = (root or data_root()) / "digits"
    if not folder.is_dir():
        _write(folder)
    if not (folder / split).is_dir():
        raise UserError(
            f"{str(folder)!r} has no folder {split!r}; the splits are train and val, and a folder "
            "that lacks one is written again after it was removed"
        )
    return folder / split


def _write(folder: Path) -> None:
    # Import here: Hydra's plugin registers the resolver in every program that uses Hydra.
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Write elsewhere and rename, so that an interrupted process leaves no partial folder.
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".digits-"))
    # Only the owner may read the folder of `mkdtemp`; a folder within it has usual permissions.
    whole = scratch / folder.name
    seen = np.zeros(10, dtype=int)
    for number, (pixels, target) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        split = "train" if seen[target] < TRAIN_PER_CLASS else "val"
        seen[target] += 1
        place = whole / split / str(target)
        place.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
        grey.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(place / f"{number:04d}.png")
    try:
        os.replace(whole, folder)
    except OSError:
        # Another process was faster; its images are the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
