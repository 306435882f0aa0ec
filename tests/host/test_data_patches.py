"""Tests of the patches of data sets and loaders; see ``test_patches.py``."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from solo_ext.config.schema import Augmentation
from solo_ext.core.errors import ConfigError
from solo_ext.host import detect
from tests import forks
from tests.host.conftest import Without

GENERATION = detect().generation
IN_A_WORKER = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    images = pickle.load(file)
torch.save(list(torch.utils.data.DataLoader(images, batch_size=16)), sys.argv[2])
"""


def indexed_images(images: Path, *, own_transform: bool = False) -> Any:
    """The data set that the host itself makes of class folders, with a transform of its own."""
    folder = "solo.data" if GENERATION == "main" else "solo.utils"
    loading = importlib.import_module(f"{folder}.pretrain_dataloader")
    transform = transforms.ToTensor()
    if own_transform:
        transform = loading.FullTransformPipeline([loading.NCropAugmentation(transform, 1)])
    prepare_datasets = loading.prepare_datasets
    if GENERATION == "main":
        return prepare_datasets("custom", transform, train_data_path=images)
    return prepare_datasets("custom", transform, data_dir=images.parent, train_dir=images.name)


@pytest.mark.slow
@pytest.mark.patch("index-dataset")
def test_index_dataset_in_a_spawned_worker(without: Without, images: Path, tmp_path: Path) -> None:
    def loader() -> Iterator[Any]:
        return iter(
            DataLoader(
                # On the release its class cannot be imported before the host is loaded.
                indexed_images(images, own_transform=True),
                batch_size=16,
                num_workers=1,
                multiprocessing_context="spawn",
            )
        )

    with without(), pytest.raises((AttributeError, pickle.PicklingError)):
        next(loader())
    if GENERATION == "main":
        # A fork has imported solo-learn as a worker would, without the patches, but seconds ago.
        pickled, loaded = tmp_path / "images.pkl", tmp_path / "batches.pt"
        pickled.write_bytes(pickle.dumps(indexed_images(images, own_transform=True)))
        done = forks.run("-c", IN_A_WORKER, pickled, loaded)
        assert done.returncode == 0, done.stderr[-3000:]
        batches = torch.load(loaded)
    else:
        batches = list(loader())
    assert torch.cat([b[0] for b in batches]).tolist() == list(range(48))
    assert torch.cat([b[2] for b in batches]).tolist() == [i // 16 for i in range(48)]
    assert torch.equal(batches[1][1][0][3], indexed_images(images)[19][1])


@pytest.mark.patch("own-size")
@pytest.mark.parametrize(("size", "side"), [((40, 32), 32), ((223, 300), 223), ((300, 260), 224)])
def test_own_size(without: Without, size: tuple[int, int], side: int) -> None:
    from solo.data.classification_dataloader import prepare_transforms

    image = Image.new("RGB", size, (255, 0, 0))

    def sides() -> list[tuple[int, ...]]:
        return [tuple(transform(image).shape) for transform in prepare_transforms("custom")]

    def values() -> Tensor:
        found: Tensor = prepare_transforms("custom")[1](image)[:, 0, 0]
        return found

    assert sides() == [(3, side, side)] * 2
    patched = values()
    with without():
        assert sides() == [(3, 224, 224)] * 2
        torch.testing.assert_close(values(), patched)


@pytest.mark.patch("dali")
def test_dali_data_module_on_the_cpu(without: Without, images: Path) -> None:
    """Epochs of full length after one cut short, with true indices."""
    pytest.importorskip("nvidia.dali")
    from solo.data import dali_dataloader
    from solo.data.pretrain_dataloader import FullTransformPipeline, NCropAugmentation

    section = OmegaConf.create(Augmentation(crop_size=16, num_crops=2).model_dump())
    del section["mean"], section["std"]

    def loader() -> Any:
        made = dali_dataloader.build_transform_pipeline_dali("custom", section, "cpu")
        module = dali_dataloader.PretrainDALIDataModule(
            dataset="custom",
            train_data_path=images,
            transforms=FullTransformPipeline([NCropAugmentation(made, 2)]),
            num_large_crops=2,
            num_small_crops=0,
            batch_size=20,
            num_workers=1,
            dali_device="cpu",
            encode_indexes_into_labels=True,
        )
        module.trainer = SimpleNamespace(local_rank=0, global_rank=0, world_size=1)
        module.setup()
        return module.train_dataloader()

    with without(), pytest.raises(RuntimeError, match="CUDA is not available"):
        loader()
    batches = loader()
    batch = next(iter(batches))
    epochs = [list(batches) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(batches)] * 2 == [2, 2]
    for indices, crops, targets in [batch, *epochs[0], *epochs[1]]:
        assert torch.equal(targets, indices // 16)
        assert len(targets.unique()) > 1, "shuffled"
        assert [tuple(crop.shape) for crop in crops] == [(20, 3, 16, 16)] * 2


@pytest.mark.patch("dali")
def test_dali_gives_indices_by_default_and_may_lack_validation(without: Without) -> None:
    pytest.importorskip("nvidia.dali")
    from solo.data.dali_dataloader import PretrainDALIDataModule

    def encoded(method: str = "simclr", **dali: Any) -> bool:
        cfg = OmegaConf.create({"method": method, "data": {"format": "dali"}, "dali": dali})
        filled = PretrainDALIDataModule.add_and_assert_specific_cfg(cfg)
        return bool(filled.dali.encode_indexes_into_labels)

    assert encoded()
    assert not encoded(encode_indexes_into_labels=False)
    assert encoded("deepclusterv2")
    with pytest.raises(ConfigError, match="labels=false: deepclusterv2 looks samples up by index"):
        encoded("deepclusterv2", encode_indexes_into_labels=False)
    module = PretrainDALIDataModule("custom", "images", None, 2, 0, 20)
    module.val_dataloader = lambda: None
    assert "val_dataloader" not in vars(module)
    module.val_dataloader = lambda: [1]
    assert module.val_dataloader() == [1]
    with without():
        assert not encoded()
