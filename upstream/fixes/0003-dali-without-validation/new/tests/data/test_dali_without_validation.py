import lightning.pytorch as pl
import main_pretrain
import numpy as np
import pytest
from PIL import Image
from solo.data.pretrain_dataloader import build_transform_pipeline

from ..methods.utils import gen_base_cfg, prepare_dummy_dataloaders


class DummyDALIDataModule(pl.LightningDataModule):
    """Stands in for DALI, which is not needed to test what the script makes of its data module."""

    def __init__(self, batch_size, num_large_crops, **kwargs):
        super().__init__()
        self.train_loader, _ = prepare_dummy_dataloaders(
            "cifar10", num_large_crops=num_large_crops, num_classes=1, batch_size=batch_size
        )

    def train_dataloader(self):
        return self.train_loader


@pytest.mark.parametrize("no_labels, validates", [(False, True), (False, False), (True, False)])
def test_dali_without_validation(no_labels, validates, monkeypatch, tmp_path):
    for split in ["train", "val"]:
        (tmp_path / split / "0").mkdir(parents=True)
        for i in range(2):
            im = Image.fromarray(np.random.randint(0, 256, (32, 32, 3), dtype="uint8"))
            im.save(tmp_path / split / "0" / f"{i}.png")

    cfg = gen_base_cfg("barlow_twins", batch_size=2, num_classes=1)
    cfg.method_kwargs = {"proj_hidden_dim": 16, "proj_output_dim": 16}
    cfg.data.train_path = str(tmp_path / "train")
    cfg.data.val_path = str(tmp_path / "val") if validates else None
    cfg.data.format = "dali"
    cfg.data.no_labels = no_labels
    cfg.data.num_workers = 0
    cfg.dali = {"device": "cpu", "encode_indexes_into_labels": False}
    cfg.augmentations = [
        {
            "crop_size": 32,
            "num_crops": 2,
            "rrc": {"enabled": False},
            **{
                name: {"prob": 0.0}
                for name in [
                    "color_jitter",
                    "grayscale",
                    "gaussian_blur",
                    "solarization",
                    "equalization",
                    "horizontal_flip",
                ]
            },
        }
    ]
    cfg.devices = "1"
    cfg.strategy = "auto"
    cfg.fast_dev_run = True

    monkeypatch.setattr(main_pretrain, "_dali_avaliable", True)
    monkeypatch.setattr(main_pretrain, "PretrainDALIDataModule", DummyDALIDataModule, raising=False)
    monkeypatch.setattr(
        main_pretrain,
        "build_transform_pipeline_dali",
        lambda dataset, cfg, dali_device: build_transform_pipeline(dataset, cfg),
        raising=False,
    )
    trainers = []
    make_trainer = main_pretrain.Trainer

    def remember(**kwargs):
        trainers.append(make_trainer(**kwargs))
        return trainers[-1]

    # the script takes the names of arguments from the class
    remember.__init__ = make_trainer.__init__
    monkeypatch.setattr(main_pretrain, "Trainer", remember)

    # without Hydra's command line
    main_pretrain.main.__wrapped__(cfg)
    assert trainers[0].global_step == 1
    assert ("val_loss" in trainers[0].callback_metrics) == validates
