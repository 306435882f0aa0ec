"""The table of a teacher's embeddings."""

from __future__ import annotations

import torch
from torch import nn

from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.memory.teacher_cache import TeacherCache


def test_rows_by_sample() -> None:
    cache = TeacherCache(3)
    assert not cache.complete
    cache.resize_(5)
    rows = torch.randn(5, 3)
    cache.update_(torch.tensor([4, 0, 2]), rows[[4, 0, 2]].requires_grad_())
    assert cache.complete is False
    assert not cache.value.requires_grad
    cache.update_(torch.tensor([1, 3, 4]), rows[[1, 3, 4]])
    assert cache.complete is True
    assert torch.equal(cache.get(torch.tensor([3, 3, 0])), rows[[3, 3, 0]])
    cache.update_(torch.tensor([3]), torch.ones(1, 3, dtype=torch.float64))
    assert torch.equal(cache.get(torch.tensor([3])), torch.ones(1, 3))
    cache.resize_(5)
    assert not cache.complete


def test_nothing_in_checkpoints_or_broadcasts() -> None:
    root = nn.Module()
    root.cache = TeacherCache(3)
    root.cache.resize_(4)
    assert not root.state_dict()
    keep_out_of_broadcast(root)
    assert root._ddp_params_and_buffers_to_ignore == ["cache.filled", "cache.value"]


def test_step_runs_on_meta_tensors() -> None:
    cache = TeacherCache(3)
    cache.resize_(5)
    cache.to("meta")
    indices = torch.zeros(2, dtype=torch.long, device="meta")
    cache.update_(indices, torch.zeros(2, 3, device="meta"))
    assert cache.get(indices).shape == (2, 3)
