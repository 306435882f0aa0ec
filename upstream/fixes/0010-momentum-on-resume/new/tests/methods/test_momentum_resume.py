import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from solo.methods import BYOL

from .utils import gen_base_cfg, prepare_dummy_dataloaders


class Recorder(BYOL):
    """Remembers after which batches there was a momentum update, and with which tau."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.updates = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tau, last_step = self.momentum_updater.cur_tau, self.last_step
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step > last_step:
            self.updates.append((self.current_epoch, batch_idx, tau))


class SaveFirstEpoch(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_momentum_resume(accumulate_grad_batches, tmp_path):
    cfg = gen_base_cfg("byol", batch_size=2, num_classes=10, momentum=True)
    cfg.data.dataset = "cifar10"
    cfg.momentum.base_tau = 0.5
    cfg.method_kwargs = {"proj_hidden_dim": 16, "proj_output_dim": 16, "pred_hidden_dim": 16}
    train_dl, _ = prepare_dummy_dataloaders(
        "cifar10", num_large_crops=2, num_classes=10, batch_size=2
    )

    def fit(callbacks=None, ckpt_path=None):
        model = Recorder(cfg)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            limit_train_batches=4,
            accumulate_grad_batches=accumulate_grad_batches,
            logger=False,
            enable_checkpointing=False,
            callbacks=callbacks,
        )
        trainer.fit(model, train_dl, ckpt_path=ckpt_path)
        return model.updates

    updates = fit(callbacks=[SaveFirstEpoch(tmp_path / "byol.ckpt")])
    assert updates[0][2] == 0.5
    assert len(updates) == 8 // accumulate_grad_batches

    resumed = fit(ckpt_path=tmp_path / "byol.ckpt")
    assert resumed == updates[len(updates) // 2 :]
