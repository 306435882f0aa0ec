import pytest
import torch
from solo.methods import METHODS, ProtoCPC

from .utils import gen_base_cfg, gen_batch, gen_trainer, prepare_dummy_dataloaders


def gen_cfg(dataset, num_classes, num_small_crops=0, **method_kwargs):
    cfg = gen_base_cfg(
        "protocpc",
        batch_size=2,
        num_classes=num_classes,
        num_small_crops=num_small_crops,
        momentum=True,
    )
    cfg.data.dataset = dataset
    cfg.method_kwargs = {"proj_output_dim": 64, "proj_hidden_dim": 128, "num_prototypes": 32}
    cfg.method_kwargs.update(method_kwargs)
    return cfg


@pytest.mark.parametrize(
    "dataset, num_classes, num_small_crops",
    [("imagenet100", 100, 0), ("cifar10", 10, 0), ("cifar10", 10, 2)],
)
def test_protocpc(dataset, num_classes, num_small_crops):
    assert METHODS["protocpc"] is ProtoCPC

    cfg = gen_cfg(dataset, num_classes, num_small_crops)
    model = ProtoCPC(cfg)

    # test arguments
    model.add_and_assert_specific_cfg(cfg)

    # test parameters
    assert model.learnable_params is not None

    # test forward
    batch, _ = gen_batch(cfg.optimizer.batch_size, num_classes, dataset)
    for out in model(batch[1][0]), model.momentum_forward(batch[1][0]):
        assert out["feats"].size() == (cfg.optimizer.batch_size, model.features_dim)
        assert out["z"].size() == (cfg.optimizer.batch_size, 64)
        assert out["p"].size() == (cfg.optimizer.batch_size, 32)

    # test training
    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        dataset,
        num_large_crops=cfg.data.num_large_crops,
        num_small_crops=num_small_crops,
        num_classes=num_classes,
        batch_size=cfg.optimizer.batch_size,
    )
    prototypes = model.prototypes.weight_v.clone()
    trainer.fit(model, train_dl, val_dl)
    assert torch.equal(model.prototypes.weight_v, prototypes), "frozen in the first epoch"
    prior = model.protocpc_loss_func.prior
    torch.testing.assert_close(prior.sum(), torch.tensor(32.0))
    assert prior.std() > 0
    assert "protocpc_loss_func.prior" in model.state_dict()
