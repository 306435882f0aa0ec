import json

import pytest
import torch
from omegaconf import OmegaConf
from solo.methods import METHODS, SEED, SimCLR

from .utils import gen_base_cfg, gen_batch, gen_trainer, prepare_dummy_dataloaders


@pytest.fixture
def teacher_dir(tmp_path):
    """A pretrained model as the library's Checkpointer would have saved it."""
    cfg = gen_base_cfg("simclr", batch_size=2, num_classes=10)
    cfg.method_kwargs = {"proj_output_dim": 64, "proj_hidden_dim": 128, "temperature": 0.2}
    teacher = SimCLR(cfg)
    torch.save({"state_dict": teacher.state_dict()}, tmp_path / "test-ep=0.ckpt")
    (tmp_path / "args.json").write_text(json.dumps(OmegaConf.to_container(cfg)))
    return tmp_path


def gen_cfg(teacher_dir, dataset="cifar10", num_classes=10):
    cfg = gen_base_cfg("seed", batch_size=2, num_classes=num_classes)
    cfg.data.dataset = dataset
    cfg.method_kwargs = {
        "teacher_dir": str(teacher_dir),
        "proj_output_dim": 64,
        "proj_hidden_dim": 128,
    }
    return cfg


@pytest.mark.parametrize("dataset, num_classes", [("imagenet100", 100), ("cifar10", 10)])
def test_seed(teacher_dir, dataset, num_classes):
    assert METHODS["seed"] is SEED

    cfg = gen_cfg(teacher_dir, dataset, num_classes)
    model = SEED(cfg)

    # test arguments
    model.add_and_assert_specific_cfg(cfg)
    assert (model.student_temperature, model.teacher_temperature) == (0.2, 0.01)

    # test parameters
    learnable = [id(p) for group in model.learnable_params for p in group["params"]]
    assert not any(id(p) in learnable for p in model.teacher.parameters())

    # test forward
    batch, _ = gen_batch(cfg.optimizer.batch_size, num_classes, dataset)
    out = model(batch[1][0])
    assert out["logits"].size() == (cfg.optimizer.batch_size, num_classes)
    assert out["feats"].size() == (cfg.optimizer.batch_size, model.features_dim)
    assert out["z"].size() == (cfg.optimizer.batch_size, 64)
    assert model.teacher_forward(batch[1][0]).size() == (cfg.optimizer.batch_size, 64)

    # test training
    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        dataset,
        num_large_crops=cfg.data.num_large_crops,
        num_small_crops=0,
        num_classes=num_classes,
        batch_size=cfg.optimizer.batch_size,
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer.fit(model, train_dl, val_dl)
    after = model.state_dict()
    changed = {k for k, v in before.items() if not torch.equal(v, after[k])}
    assert not any(k.startswith("teacher.") for k in changed), "a frozen teacher has changed"
    assert {"queue", "queue_ptr", "projector.0.weight"} <= changed
    assert not torch.equal(before["queue"][:2], after["queue"][:2])
    assert torch.equal(before["queue"][2:], after["queue"][2:])


def test_seed_loads_the_teacher(teacher_dir):
    model = SEED(gen_cfg(teacher_dir))
    state = torch.load(teacher_dir / "test-ep=0.ckpt")["state_dict"]
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, state[name])
    model.train()
    assert model.training and not any(m.training for m in model.teacher.modules())

    # a checkpoint of another architecture is refused
    torch.save(
        {"state_dict": {"backbone.conv1.weight": state["backbone.conv1.weight"]}},
        teacher_dir / "test-ep=0.ckpt",
    )
    with pytest.raises(AssertionError, match="has no"):
        SEED(gen_cfg(teacher_dir))
