"""The frozen network of distillation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from solo_ext.core.errors import UserError
from solo_ext.memory.features import FeatureQueue
from solo_ext.memory.teacher import Teacher
from tests.memory.conftest import through_a_file


def networks(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    backbone = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return backbone, nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.BatchNorm1d(5))


def make(seed: int = 0, digest: str = "0123456789abcdef", **settings: Any) -> Teacher:
    return Teacher(*networks(seed), digest=digest, **settings)


class Method(nn.Module):
    """What a method holds besides its teacher."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.student = nn.Linear(4, 5)
        self.queue = FeatureQueue(6, 2)
        self.teacher = teacher


def test_outputs_are_those_of_the_networks() -> None:
    backbone, head = networks()
    x = torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        feats = backbone.eval()(x)
        z = head.eval()(feats)
    out = Teacher(backbone, head, digest="a")(x)
    assert torch.equal(out, z)
    alone = Teacher(backbone, digest="a")(x)
    assert torch.equal(alone, feats)


def test_stays_in_eval_mode_and_changes_nothing() -> None:
    method = Method(make())
    before = copy.deepcopy(dict(method.teacher.backbone.state_dict()))
    method.train()
    x = torch.randn(6, 3, 8, 8)
    first, second = method.teacher(x), method.teacher.train(True)(x)
    assert torch.equal(first, second)
    assert not any(m.training for m in method.teacher.modules())
    assert method.student.training
    for key, value in method.teacher.backbone.state_dict().items():
        assert torch.equal(value, before[key])


def test_outputs_are_constants_that_autograd_may_keep() -> None:
    teacher = make()
    assert not any(p.requires_grad for p in teacher.parameters())
    out = teacher(torch.randn(6, 3, 8, 8, requires_grad=True))
    assert not out.requires_grad
    assert not out.is_inference()
    weight = torch.randn(5, 5, requires_grad=True)
    (out @ weight).square().sum().backward()
    assert weight.grad is not None
    out.add_(1)


@pytest.mark.parametrize("outer", [False, True])
def test_precision(outer: bool) -> None:
    x = torch.randn(6, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
        full, half = make()(x), make(dtype=torch.bfloat16)(x)
    assert torch.equal(full, make()(x))
    assert full.dtype == half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, rtol=0.05, atol=0.05)
    # Computed in bf16, not rounded at the end alone.
    assert torch.equal(half, half.bfloat16().float())


def test_runs_on_meta_tensors() -> None:
    teacher = make(dtype=torch.bfloat16).to("meta")
    assert teacher(torch.zeros(2, 3, 8, 8, device="meta")).shape == (2, 5)


def test_checkpoint_without_weights() -> None:
    method = Method(make())
    kept = {k for k in method.state_dict() if k.startswith("teacher.")}
    assert kept == {"teacher._extra_state"}
    state = through_a_file(method)
    other = Method(make())
    weights = copy.deepcopy(dict(other.teacher.backbone.state_dict()))
    other.load_state_dict(state)
    assert torch.equal(other.student.weight, method.student.weight)
    for key, value in other.teacher.backbone.state_dict().items():
        assert torch.equal(value, weights[key])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*teacher\.more"):
        other.load_state_dict({**state, "teacher.more": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*student\.weight"):
        other.load_state_dict({k: v for k, v in state.items() if k != "student.weight"})


def test_another_teacher_is_refused() -> None:
    state = through_a_file(Method(make()))
    other = Method(make(digest="fedcba9876543210"))
    with pytest.raises(UserError, match=r"0123456789abcdef, not with fedcba9876543210"):
        other.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Any) -> None:
    method = Method(make())
    twin = copied(method)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(twin.teacher(x), method.teacher(x))
    assert twin.state_dict().keys() == method.state_dict().keys()
    twin.load_state_dict(method.state_dict())
    twin.train()
    assert not twin.teacher.backbone.training
