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
    """Registers ``${solo_ext.digits:<split>[,turned]}``, which resolves to a folder of digits.

    >>> add_resolvers()
    >>> OmegaConf.has_resolver("solo_ext.digits")
    True
    """
    if not OmegaConf.has_resolver("solo_ext.digits"):
        OmegaConf.register_new_resolver(
            "solo_ext.digits",
            lambda split, *ways: str(digits_folder(split, turned=_turned(*ways))),
        )


def _turned(way: str | None = None) -> bool:
    if way not in (None, "turned"):
        raise UserError(f"${{solo_ext.digits:...,{way}}}: the one word after the split is turned")
    return way == "turned"


def digits_folder(split: str, root: Path | None = None, *, turned: bool = False) -> Path:
    """Folder of the digits, ``<split>/<class>/<number>.png``; written on first use below ``root``.

    The 1,797 images of 8 x 8 pixels (16 grey levels) come with scikit-learn (Alpaydin and
    Kaynak, UCI 1998), scaled to 32 x 32: ``train`` has 140 of each class, ``val`` the other 397.
    With ``turned``, there are all eight rotations and reflections of each image, and a class for
    each digit in each of these ways: 80 classes ``<digit>-<way>``, eight times as many images.

    Raises:
        UserError: there is no such split, or the folder exists but lacks it.

    >>> sorted(folder.name for folder in digits_folder("train").iterdir())
    ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
    """
    folder = (root or data_root()) / ("digits-turned" if turned else "digits")
    if not folder.is_dir():
        _write(folder, range(8) if turned else None)
    if not (folder / split).is_dir():
        raise UserError(
            f"{str(folder)!r} has no folder {split!r}; the splits are train and val, and a folder "
            "that lacks one is written again after it was removed"
        )
    return folder / split


def _write(folder: Path, ways: range | None) -> None:
    # Import these here: Hydra's plugin imports this module in every program that uses Hydra.
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Write elsewhere and rename, so that an interrupted process leaves no partial folder.
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".digits-"))
    # Only the owner may read the folder of `mkdtemp`; a folder in it has the usual permissions.
    whole = scratch / folder.name
    seen = np.zeros(10, dtype=int)
    for number, (pixels, target) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        split = "train" if seen[target] < TRAIN_PER_CLASS else "val"
        seen[target] += 1
        grey = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
        upright = np.asarray(grey.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        for way in ways or (0,):
            place = whole / split / (str(target) if ways is None else f"{target}-{way}")
            place.mkdir(parents=True, exist_ok=True)
            turned = np.rot90(upright if way < 4 else upright.T, way)
            Image.fromarray(turned).save(place / f"{number:04d}.png")
    try:
        os.replace(whole, folder)
    except OSError:
        # Another process was faster; its images are the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
