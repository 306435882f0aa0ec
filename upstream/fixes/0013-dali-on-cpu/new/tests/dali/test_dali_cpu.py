import pytest
import torch
from omegaconf import OmegaConf
from solo.data.dali_dataloader import (
    ClassificationDALIDataModule,
    PretrainDALIDataModule,
    build_transform_pipeline_dali,
)
from solo.data.pretrain_dataloader import FullTransformPipeline, NCropAugmentation

from .utils import DummyDataset


class DummyTrainer:
    local_rank = 0
    global_rank = 0
    world_size = 1


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_pretrain_on_cpu(no_gpu, tmp_path):
    cfg = OmegaConf.create(
        {
            "crop_size": 32,
            "rrc": {"enabled": True, "crop_min_scale": 0.2, "crop_max_scale": 1.0},
            "color_jitter": {"prob": 0.0},
            "grayscale": {"prob": 0.2},
            "gaussian_blur": {"prob": 0.0},
            "solarization": {"prob": 0.0},
            "equalization": {"prob": 0.0},
            "horizontal_flip": {"prob": 0.5},
            "num_crops": 2,
        }
    )
    transform = build_transform_pipeline_dali("custom", cfg, dali_device="cpu")
    with DummyDataset(tmp_path / "train", tmp_path / "val", 2, 2):
        data = PretrainDALIDataModule(
            dataset="custom",
            train_data_path=tmp_path / "train",
            transforms=FullTransformPipeline([NCropAugmentation(transform, 2)]),
            num_large_crops=2,
            num_small_crops=0,
            batch_size=2,
            num_workers=1,
            dali_device="cpu",
        )
        data.trainer = DummyTrainer()
        data.setup()
        batches = list(data.train_dataloader())

    assert len(batches) == 2
    for _, crops, targets in batches:
        assert [tuple(crop.size()) for crop in crops] == [(2, 3, 32, 32)] * 2
        assert all(x.device.type == "cpu" for x in [*crops, targets])


def test_linear_on_cpu(no_gpu, tmp_path):
    with DummyDataset(tmp_path / "train", tmp_path / "val", 2, 2):
        data = ClassificationDALIDataModule(
            dataset="custom",
            train_data_path=tmp_path / "train",
            val_data_path=tmp_path / "val",
            batch_size=2,
            num_workers=1,
            dali_device="cpu",
        )
        data.trainer = DummyTrainer()
        data.setup()
        for loader in [data.train_dataloader(), data.val_dataloader()]:
            batches = list(loader)
            assert len(batches) == 2
            for x, targets in batches:
                assert tuple(x.size()) == (2, 3, 224, 224)
                assert x.device.type == targets.device.type == "cpu"
