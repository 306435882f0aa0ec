import importlib
import json
import sys
import types

import main_knn
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from solo.methods import BarlowTwins

from ..methods.utils import gen_base_cfg, gen_trainer, prepare_dummy_dataloaders

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def arguments(tmp_path):
    # a run
    cfg = gen_base_cfg("barlow_twins", batch_size=2, num_classes=2)
    cfg.method_kwargs = {"proj_hidden_dim": 16, "proj_output_dim": 16}
    cfg.data.dataset = "cifar10"
    model = BarlowTwins(cfg)
    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        "cifar10", num_large_crops=2, num_classes=2, batch_size=2
    )
    trainer.fit(model, train_dl, val_dl)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    trainer.save_checkpoint(run_dir / "test-ep=0.ckpt")
    with open(run_dir / "args.json", "w") as f:
        json.dump(OmegaConf.to_container(cfg), f)

    # and some images
    for split in ["train", "val"]:
        for label in range(2):
            (tmp_path / split / str(label)).mkdir(parents=True)
            im = np.random.randint(0, 256, (32, 32, 3), dtype="uint8")
            Image.fromarray(im).save(tmp_path / split / str(label) / "0.png")

    return [
        *("--dataset", "custom", "--batch_size", "2", "--num_workers", "0"),
        *("--train_data_path", str(tmp_path / "train"), "--val_data_path", str(tmp_path / "val")),
        *("--pretrained_checkpoint_dir", str(run_dir)),
    ]


def test_main_knn(arguments, monkeypatch):
    features = []

    def run_knn(train_features, test_features, **kwargs):
        features.extend([train_features, test_features])
        return 0, 0

    monkeypatch.setattr(main_knn, "run_knn", run_knn)
    knn_arguments = ["--k", "1", "--distance_function", "euclidean", "--feature_type", "backbone"]
    monkeypatch.setattr(sys, "argv", ["main_knn.py", *arguments, *knn_arguments])
    main_knn.main()

    assert [f.size() for f in features] == [(2, 512), (2, 512)]
    assert all(f.device == torch.device(DEVICE) for f in features)


def test_main_umap(arguments, monkeypatch):
    devices = []

    class OfflineUMAP:
        def plot(self, device, model, dataloader, plot_path):
            devices.append((str(device), str(next(model.parameters()).device)))

    # only the device matters here, and UMAP might not be installed
    auto_umap = types.SimpleNamespace(OfflineUMAP=OfflineUMAP)
    monkeypatch.setitem(sys.modules, "solo.utils.auto_umap", auto_umap)
    monkeypatch.delitem(sys.modules, "main_umap", raising=False)
    main_umap = importlib.import_module("main_umap")
    monkeypatch.setattr(sys, "argv", ["main_umap.py", *arguments])
    main_umap.main()

    assert devices == [(DEVICE, DEVICE)] * 2
