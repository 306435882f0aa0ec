import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from solo.methods import DeepClusterV2

from .utils import gen_base_cfg, prepare_dummy_dataloaders


class Recorder(DeepClusterV2):
    """Remembers what the clustering is given, and the assignments of the first step."""

    def on_train_epoch_start(self):
        if self.current_epoch > 0:
            self.memory = self.local_memory_index.clone(), self.local_memory_embeddings.clone()
        super().on_train_epoch_start()

    def on_train_batch_start(self, batch, batch_idx):
        if not hasattr(self, "first_assignments"):
            self.first_assignments = self.assignments.clone()


class SaveWithinEpoch(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def gen_model():
    cfg = gen_base_cfg("deepclusterv2", batch_size=2, num_classes=10)
    cfg.data.dataset = "cifar10"
    cfg.method_kwargs = {
        "proj_output_dim": 8,
        "proj_hidden_dim": 16,
        "num_prototypes": [2, 2],
        "kmeans_iters": 2,
    }
    return Recorder(cfg)


@pytest.fixture
def fit():
    train_dl, _ = prepare_dummy_dataloaders(
        "cifar10", num_large_crops=2, num_classes=10, batch_size=2
    )
    train_dl = torch.utils.data.DataLoader(
        torch.utils.data.Subset(train_dl.dataset, range(8)), batch_size=2
    )

    def fit(model, max_epochs, callbacks=None, ckpt_path=None):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            callbacks=callbacks,
        )
        trainer.fit(model, train_dl, ckpt_path=ckpt_path)
        return trainer

    return fit


def test_deepclusterv2_resume(fit, tmp_path):
    model = gen_model()
    fit(model, max_epochs=1).save_checkpoint(tmp_path / "deepclusterv2.ckpt")

    # the next epoch clusters what the previous one stored
    resumed = gen_model()
    trainer = fit(resumed, max_epochs=2, ckpt_path=tmp_path / "deepclusterv2.ckpt")
    assert trainer.global_step == 8
    index, embeddings = resumed.memory
    assert torch.equal(index, torch.arange(8))
    assert torch.equal(index, model.local_memory_index)
    assert torch.equal(embeddings, model.local_memory_embeddings)
    assert (resumed.assignments >= 0).all()


def test_deepclusterv2_resume_within_epoch(fit, tmp_path):
    model = gen_model()
    fit(model, max_epochs=2, callbacks=[SaveWithinEpoch(tmp_path / "deepclusterv2.ckpt")])
    assert (model.assignments >= 0).all()

    resumed = gen_model()
    trainer = fit(resumed, max_epochs=2, ckpt_path=tmp_path / "deepclusterv2.ckpt")
    assert trainer.global_step == 8
    assert torch.equal(resumed.first_assignments, model.assignments)
