import pytest
import torch
from solo.methods import METHODS, HardNegative

from .utils import gen_base_cfg, gen_batch, gen_trainer, prepare_dummy_dataloaders


@pytest.mark.parametrize("dataset, num_classes", [("imagenet100", 100), ("cifar10", 10)])
def test_hard_negative(dataset, num_classes):
    assert METHODS["hard_negative"] is HardNegative

    cfg = gen_base_cfg("hard_negative", batch_size=2, num_classes=num_classes)
    cfg.data.dataset = dataset
    cfg.method_kwargs = {"proj_output_dim": 256, "proj_hidden_dim": 2048}
    model = HardNegative(cfg)

    # test arguments
    model.add_and_assert_specific_cfg(cfg)
    assert (model.temperature, model.tau_plus, model.beta) == (0.5, 0.1, 1.0)

    # test parameters
    assert model.learnable_params is not None

    # test forward
    batch, _ = gen_batch(cfg.optimizer.batch_size, num_classes, dataset)
    out = model(batch[1][0])
    assert out["logits"].size() == (cfg.optimizer.batch_size, num_classes)
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
    trainer.fit(model, train_dl, val_dl)


@pytest.mark.parametrize("wrong", [{"tau_plus": 1}, {"beta": -1}])
def test_hard_negative_refuses(wrong):
    cfg = gen_base_cfg("hard_negative", batch_size=2, num_classes=100)
    cfg.method_kwargs = {"proj_output_dim": 256, "proj_hidden_dim": 2048, **wrong}
    with pytest.raises(AssertionError):
        HardNegative(cfg)
