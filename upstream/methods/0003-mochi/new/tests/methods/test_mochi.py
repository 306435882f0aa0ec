import pytest
import torch
from solo.methods import METHODS, MoCHi

from .utils import gen_base_cfg, gen_batch, gen_trainer, prepare_dummy_dataloaders


@pytest.mark.parametrize("dataset, num_classes", [("imagenet100", 100), ("cifar10", 10)])
def test_mochi(dataset, num_classes):
    assert METHODS["mochi"] is MoCHi

    cfg = gen_base_cfg("mochi", batch_size=2, num_classes=num_classes, momentum=True)
    cfg.data.dataset = dataset
    cfg.method_kwargs = {
        "proj_output_dim": 256,
        "proj_hidden_dim": 2048,
        "temperature": 0.2,
        "warmup_epochs": 0,
    }
    model = MoCHi(cfg)

    # test arguments
    model.add_and_assert_specific_cfg(cfg)
    assert (model.num_hard, model.num_pair_mixes, model.num_query_mixes) == (1024, 1024, 128)

    # test parameters
    assert model.learnable_params is not None

    # test forward
    batch, _ = gen_batch(cfg.optimizer.batch_size, num_classes, dataset)
    for out in model(batch[1][0]), model.momentum_forward(batch[1][0]):
        assert out["feats"].size() == (cfg.optimizer.batch_size, model.features_dim)
        assert out["z"].size() == (cfg.optimizer.batch_size, 256)

    # test training
    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        dataset,
        num_large_crops=cfg.data.num_large_crops,
        num_small_crops=0,
        num_classes=num_classes,
        batch_size=cfg.optimizer.batch_size,
    )
    queue = model.queue.clone()
    trainer.fit(model, train_dl, val_dl)
    assert not torch.equal(model.queue[:, :, :2], queue[:, :, :2])
    assert torch.equal(model.queue[:, :, 2:], queue[:, :, 2:])


def test_mochi_refuses_to_mine_more_than_the_queue():
    cfg = gen_base_cfg("mochi", batch_size=2, num_classes=100, momentum=True)
    cfg.method_kwargs = {
        "proj_output_dim": 256,
        "proj_hidden_dim": 2048,
        "temperature": 0.2,
        "queue_size": 64,
    }
    with pytest.raises(AssertionError):
        MoCHi(cfg)
