import torch
from lightning.pytorch import Trainer
from solo.methods import SwAV

from .utils import gen_base_cfg, prepare_dummy_dataloaders


def test_swav_resume(tmp_path):
    cfg = gen_base_cfg("swav", batch_size=2, num_classes=10)
    cfg.data.dataset = "cifar10"
    cfg.method_kwargs = {
        "proj_output_dim": 8,
        "proj_hidden_dim": 16,
        "num_prototypes": 4,
        "temperature": 0.1,
        "queue_size": 8,
        "epoch_queue_starts": 0,
    }
    train_dl, _ = prepare_dummy_dataloaders(
        "cifar10", num_large_crops=2, num_classes=10, batch_size=2
    )

    def fit(model, max_epochs, ckpt_path=None):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            limit_train_batches=1,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(model, train_dl, ckpt_path=ckpt_path)
        return trainer

    model = SwAV(cfg)
    fit(model, max_epochs=1).save_checkpoint(tmp_path / "swav.ckpt")
    queue = model.queue.clone()
    assert queue[:, :2].any()

    # the old queue moved on by one batch
    model = SwAV(cfg)
    trainer = fit(model, max_epochs=2, ckpt_path=tmp_path / "swav.ckpt")
    assert trainer.global_step == 2
    assert torch.equal(model.queue[:, 2:], queue[:, :-2])

    # a queue of another size starts empty
    cfg.method_kwargs.queue_size = 6
    model = SwAV(cfg)
    fit(model, max_epochs=2, ckpt_path=tmp_path / "swav.ckpt")
    assert not model.queue[:, 2:].any()

    # without training
    SwAV.load_from_checkpoint(tmp_path / "swav.ckpt", cfg=cfg)
