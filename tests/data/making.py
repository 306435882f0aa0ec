"""What tests of data sets make: a section ``data``, image files, and a comparison of batches."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Augmentation, Batch, Images, RunConfig
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import open_images


def section(path: Path | str | None, **given: Any) -> Images:
    """A section ``data`` with one path for both splits."""
    base = {"dataset": "custom", "train_path": str(path), "val_path": str(path)}
    return Images(**{**base, **given})


def opened(path: Path | str | None, split: Any = "train", **given: Any) -> Any:
    """Images at a path."""
    return open_images(section(path, **given), split)


def refused(problem: str, path: Path | str | None, **given: Any) -> ConfigError:
    """The line that says why :func:`opened` refuses something."""
    with pytest.raises(ConfigError, match=problem) as caught:
        opened(path, **given)
    assert "\n" not in str(caught.value)
    return caught.value


def save_image(path: Path, seed: int, side: int = 12) -> None:
    """Writes noise, coloured or, for odd seeds, grey."""
    shape = (side, side) if seed % 2 else (side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def run_of(data: Images, batch: int, *augmentations: Augmentation) -> RunConfig:
    """The parts of a config that loaders read."""
    return RunConfig.model_construct(
        seed=5, data=data, optimizer=Batch(batch_size=batch), augmentations=list(augmentations)
    )


def epochs(loader: Any, count: int, state: dict[str, int] | None = None) -> list[Any]:
    """The rest of the first epochs, from where the loader is, or from a state."""
    if state is not None:
        loader.load_state_dict(state)
    served: list[Any] = []
    for epoch in range(loader.state_dict()["epoch"], count):
        loader.order.set_epoch(epoch)
        served += loader
    return served


def same(a: Any, b: Any) -> bool:
    """Whether nested lists of tensors are equal bit by bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def png(level: int) -> bytes:
    """An image file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (level, 2 * level, 255 - level)).save(file, "PNG")
    return file.getvalue()


def write_folder(root: Path, files: Sequence[bytes], classes: str = "ab") -> Path:
    """Class folders, which divide the files of images evenly."""
    for index, file in enumerate(files):
        place = root / classes[index * len(classes) // len(files)] / f"{index:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file)
    return root


def write_tar(path: Path, samples: Sequence[dict[str, bytes]]) -> Path:
    """A tar in the layout of WebDataset, of samples as their files by extension."""
    return tar_of(path, *((f"{i:03}.{k}", c) for i, s in enumerate(samples) for k, c in s.items()))


def tar_of(path: Path, *files: tuple[str, bytes]) -> Path:
    """A tar of files by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_tars(folder: Path, images: Any, each: int) -> Path:
    """The files of a data set in a drawn order, as tars in a folder."""
    order = np.random.default_rng(0).permutation(len(images)).tolist()
    samples = [{"jpg": images.encoded(i), "cls": b"%d" % images.targets[i]} for i in order]
    for first in range(0, len(samples), each):
        write_tar(folder / f"train-{first // each:03}.tar", samples[first : first + each])
    return folder


def write_h5(path: Path, files: list[bytes]) -> None:
    """The first half of the files is of class a, the others of class b."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as held:
        for index, file in enumerate(files):
            held[f"{'ab'[2 * index // len(files)]}/{index}"] = np.frombuffer(file, dtype=np.uint8)


def save_table(path: Path, files: list[bytes]) -> None:
    """The same as a table of Hugging Face's."""
    datasets: Any = pytest.importorskip("datasets")
    labels = [2 * index // len(files) for index in range(len(files))]
    table = {"image": [{"bytes": f, "path": None} for f in files], "label": labels}
    label = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features(image=datasets.Image(), label=label)
    datasets.Dataset.from_dict(table, features=features).save_to_disk(str(path))
