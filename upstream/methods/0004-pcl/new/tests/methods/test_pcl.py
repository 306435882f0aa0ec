import math

import pytest
import torch
from lightning.pytorch import Trainer
from solo.methods import METHODS, PCL
from torch.utils.data import DataLoader, Dataset

from .utils import gen_base_cfg, gen_batch, gen_trainer, prepare_dummy_dataloaders


def gen_cfg(dataset="cifar10", num_classes=10, batch_size=2, **method_kwargs):
    cfg = gen_base_cfg("pcl", batch_size=batch_size, num_classes=num_classes, momentum=True)
    cfg.data.dataset = dataset
    cfg.method_kwargs = {
        "proj_output_dim": 128,
        "proj_hidden_dim": 256,
        "temperature": 0.2,
        "queue_size": 64,
        "num_prototypes": [3, 5],
        "warmup_epochs": 1,
        **method_kwargs,
    }
    return cfg


class Images(Dataset):
    """A few images with their indexes, of which the last ones have no full batch."""

    def __len__(self):
        return 18

    def __getitem__(self, index):
        return index, list(torch.randn(2, 3, 32, 32)), index % 10


def fit(model, epochs, folder, ckpt_path=None):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    loader = DataLoader(Images(), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("dataset, num_classes", [("imagenet100", 100), ("cifar10", 10)])
def test_pcl(dataset, num_classes):
    assert METHODS["pcl"] is PCL

    cfg = gen_cfg(dataset, num_classes)
    model = PCL(cfg)

    # test arguments
    model.add_and_assert_specific_cfg(cfg)

    # test parameters
    assert model.learnable_params is not None

    # test forward
    batch, _ = gen_batch(cfg.optimizer.batch_size, num_classes, dataset)
    for out in model(batch[1][0]), model.momentum_forward(batch[1][0]):
        assert out["feats"].size() == (cfg.optimizer.batch_size, model.features_dim)
        assert out["z"].size() == (cfg.optimizer.batch_size, 128)

    # test training
    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        dataset,
        num_large_crops=cfg.data.num_large_crops,
        num_small_crops=0,
        num_classes=num_classes,
        batch_size=cfg.optimizer.batch_size,
    )
    trainer.fit(model, train_dl, val_dl)


def test_pcl_clusters_and_resumes(tmp_path):
    cfg = gen_cfg(batch_size=4)
    model = PCL(cfg)
    trainer = fit(model, 1, tmp_path)
    assert not model.prototypes, "the first epoch has nothing to cluster"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    memory = model.memory.clone()

    # a resumed run clusters the memory bank of the checkpoint before its first step
    model, seen = PCL(cfg), []
    cluster_memory = model.cluster_memory
    model.cluster_memory = lambda: (seen.append(model.memory.clone()), cluster_memory())
    trainer = fit(model, 2, tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert len(seen) == 1 and torch.equal(seen[0], memory)

    assert [len(p) for p in model.prototypes] == [3, 5]
    assert model.assignments.shape == (2, 18)
    for phi in model.concentrations:
        torch.testing.assert_close(phi.mean(), torch.tensor(0.2))
    assert trainer.logged_metrics["train_proto_nce_loss_epoch"] > 0


def test_pcl_concentration():
    model = PCL(gen_cfg())
    prototypes = torch.eye(3, 128)
    z, assignments = [], []
    # two samples at a distance of 1 and ten at 2; a cluster of one counts as the loosest
    for cluster, distance, count in [(0, 1.0, 2), (1, 2.0, 10), (2, 0.0, 1)]:
        offset = torch.zeros(count, 128)
        offset[:, 100] = distance
        z.append(prototypes[cluster] + offset)
        assignments.append(torch.full((count,), cluster))
    z, assignments = torch.cat(z), torch.cat(assignments)

    small, large = 1 / math.log(12), 2 / math.log(20)
    phi = torch.tensor([small, large, large])
    phi = phi.clamp(*torch.quantile(phi, torch.tensor([0.1, 0.9])))
    expected = 0.2 * phi / phi.mean()
    found = model.compute_concentration(z, assignments, prototypes)
    torch.testing.assert_close(found, expected)

    # samples without a cluster do not count
    z, assignments = torch.cat([z, torch.randn(4, 128)]), torch.cat([assignments, -torch.ones(4)])
    found = model.compute_concentration(z, assignments.long(), prototypes)
    torch.testing.assert_close(found, expected)

    # neither do clusters without any distance lead to a division by zero
    found = model.compute_concentration(prototypes, torch.arange(3), prototypes)
    torch.testing.assert_close(found, torch.full((3,), 0.2))


def test_pcl_needs_indexes():
    cfg = gen_cfg()
    cfg.data.format = "dali"
    with pytest.raises(AssertionError):
        PCL(cfg)
    cfg.dali = {"encode_indexes_into_labels": True}
    PCL(cfg)
