"""The papers' configs, built with files of the official layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.config.compose import compose
from solo_ext.lab.training.prepare import prepare

PAPERS = {
    "protoseed_moco_v2": ("moco_v2", 65536, 128, [512, 2048, 128], False),
    "protoseed_swav": ("swav", 3000, 128, [512, 2048, 128], True),
    "protoseed_dino_resnet50": ("dino_resnet50", 65536, 256, [512, 4096, 256], True),
    "protoseed_dino_deit_small": ("dino_deitsmall16", 65536, 256, [512, 2048, 2048, 256], True),
    "seed_moco_v2": ("moco_v2", None, 128, [512, 512, 128], False),
    "seed_swav": ("swav", None, 128, [512, 512, 128], False),
}
"""File, K, D, widths of the student's head, whether it has batch norm."""


@pytest.mark.parametrize("name", PAPERS)
def test_paper_s_settings_fit_the_published_file(
    name: str, published: Callable[[str], Path], images: Path
) -> None:
    layout, prototypes, dim, widths, normalised = PAPERS[name]
    overrides = [
        "data.dataset=custom",
        f"data.train_path={images}",
        f"data.val_path={images}",
        f"method_kwargs.teacher.path={published(layout)}",
        "optimizer.batch_size=24",
    ]
    prepared = prepare(compose(f"imagenet/{name}", overrides))
    method: Any = prepared.method(prepared.cfg)
    linears = [m for m in method.projector if isinstance(m, torch.nn.Linear)]
    assert [linears[0].in_features, *(m.out_features for m in linears)] == widths
    norms = [m for m in method.projector if isinstance(m, torch.nn.BatchNorm1d)]
    assert bool(norms) is normalised
    with torch.no_grad():
        (target,) = method.targets([torch.randn(2, 3, 224, 224)])
    assert target.shape == (2, dim)
    if prototypes is None:
        assert method.queues[0].value.shape == (65536, dim)
        return
    assert method.prototypes.weight.shape == (prototypes, dim)
    loss, _ = method.distill([torch.randn(2, dim)], [target])
    assert loss.isfinite()
