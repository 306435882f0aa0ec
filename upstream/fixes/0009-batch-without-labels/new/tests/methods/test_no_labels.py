import pytest
import torch
import torch.nn.functional as F
from solo.methods.base import BaseMethod, BaseMomentumMethod

from .utils import gen_base_cfg, gen_batch


@pytest.mark.parametrize(
    "Method, step",
    [(BaseMethod, "_base_shared_step"), (BaseMomentumMethod, "_shared_step_momentum")],
)
def test_no_labels(Method, step):
    cfg = gen_base_cfg("nothing", batch_size=4, num_classes=10, momentum=True)
    cfg.momentum.classifier = True
    cfg.data.dataset = "cifar10"
    model = Method(cfg)
    (_, (X, _), targets), _ = gen_batch(4, 10, "cifar10")

    # images without a label do not count
    targets[2:] = -1
    out = getattr(model, step)(X, targets)
    assert torch.allclose(out["loss"], F.cross_entropy(out["logits"][:2], targets[:2]))

    # and there might be no others
    out = getattr(model, step)(X, -torch.ones(4).long())
    assert out["loss"] == 0
    out["loss"].backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    assert parameters
    assert all((p.grad == 0).all() for p in parameters)
