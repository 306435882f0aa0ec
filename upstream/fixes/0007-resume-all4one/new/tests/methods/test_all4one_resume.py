import torch
from lightning.pytorch import Trainer
from solo.methods import All4One

from .utils import gen_base_cfg, prepare_dummy_dataloaders


def test_all4one_resume(tmp_path):
    cfg = gen_base_cfg("all4one", batch_size=2, num_classes=10, momentum=True)
    cfg.data.dataset = "cifar10"
    cfg.method_kwargs = {
        "proj_output_dim": 16,
        "proj_hidden_dim": 16,
        "pred_hidden_dim": 16,
        "temperature": 0.2,
        "queue_size": 8,
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

    ckpt_path = tmp_path / "all4one.ckpt"
    fit(All4One(cfg), max_epochs=1).save_checkpoint(ckpt_path)
    name = "pos_enc.penc.penc.cached_penc"
    checkpoint = torch.load(ckpt_path)
    assert name not in checkpoint["state_dict"]
    assert fit(All4One(cfg), max_epochs=2, ckpt_path=ckpt_path).global_step == 2

    # older checkpoints contain the cache
    checkpoint["state_dict"][name] = torch.zeros(2, 16, 5)
    torch.save(checkpoint, ckpt_path)
    assert fit(All4One(cfg), max_epochs=2, ckpt_path=ckpt_path).global_step == 2
