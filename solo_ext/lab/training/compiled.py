"""Networks that ``torch.compile`` compiles."""

from __future__ import annotations

import lightning.pytorch as pl
import torch


def compile_networks(model: pl.LightningModule, compiled: bool | str) -> None:
    """Compiles backbone and heads in place, so that checkpoints keep their names.

    Args:
        model: a method.
        compiled: ``performance.compile`` of the run.

    >>> from torch import nn
    >>> model = pl.LightningModule()
    >>> model.backbone = nn.Linear(2, 3)
    >>> compile_networks(model, "eager")
    >>> model.backbone(torch.zeros(4, 2)).shape, list(model.state_dict())
    (torch.Size([4, 3]), ['backbone.weight', 'backbone.bias'])
    """
    if not compiled:
        return
    # All networks share torch's default limit of 8 kernels; a ninth shape would run uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    backend = compiled if isinstance(compiled, str) else "inductor"
    for name, network in model.named_children():
        # A criterion of `metric` is a loss, though it may have parameters.
        if name != "criterion" and any(True for _ in network.parameters()):
            # Compile each shape separately, so that kernels do not depend on earlier shapes.
            network.compile(dynamic=False, backend=backend)
