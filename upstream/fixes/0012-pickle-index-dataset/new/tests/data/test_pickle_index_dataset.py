import pickle

import numpy as np
import torch
from PIL import Image
from solo.data.pretrain_dataloader import (
    CustomDatasetWithoutLabels,
    dataset_with_index,
    prepare_dataloader,
)
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import ToTensor


def test_pickle_index_dataset(tmp_path):
    (tmp_path / "0").mkdir()
    for i in range(4):
        im = np.random.randint(0, 256, (8, 8, 3), dtype="uint8")
        Image.fromarray(im).save(tmp_path / "0" / f"{i}.png")

    for dataset in [
        dataset_with_index(FakeData)(size=4, image_size=(3, 8, 8), transform=ToTensor()),
        dataset_with_index(ImageFolder)(tmp_path, ToTensor()),
        dataset_with_index(CustomDatasetWithoutLabels)(tmp_path / "0", ToTensor()),
    ]:
        copy = pickle.loads(pickle.dumps(dataset))
        assert isinstance(copy, type(dataset).__mro__[1])
        assert len(copy) == 4
        index, x, y = copy[2]
        assert index == 2
        assert torch.equal(x, dataset[2][1])
        assert y == dataset[2][2]


def test_spawned_workers():
    dataset = dataset_with_index(FakeData)(size=4, image_size=(3, 8, 8), transform=ToTensor())
    loader = prepare_dataloader(dataset, batch_size=2, num_workers=1)
    loader.multiprocessing_context = "spawn"
    assert sorted(torch.cat([indexes for indexes, *_ in loader]).tolist()) == [0, 1, 2, 3]
