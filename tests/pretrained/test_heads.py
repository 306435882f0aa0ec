"""Heads rebuilt from their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from solo_ext.pretrained.loaded import build_head, load_head


def make_head(linears: int, norm: bool, bias: bool, last: str) -> nn.Sequential:
    """From 5 to 4 dimensions, with ReLU; as after training, no statistic is at its start."""
    parts: list[nn.Module] = []
    for into in (5, 6, 6)[: linears - 1]:
        parts += [nn.Linear(into, 6, bias=bias), *([nn.BatchNorm1d(6)] if norm else []), nn.ReLU()]
    parts.append(nn.Linear(6 if linears > 1 else 5, 4, bias=not bias))
    if last:
        parts.append(nn.BatchNorm1d(4, affine=last == "affine"))
    for part in parts:
        if isinstance(part, nn.BatchNorm1d):
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return nn.Sequential(*parts).eval()


@pytest.mark.parametrize(
    ("linears", "norm", "bias", "last"),
    [
        (1, False, True, ""),
        (2, True, False, "plain"),
        (3, True, True, "affine"),
        (3, False, False, ""),
    ],
)
def test_layers_are_told_from_the_weights(linears: int, norm: bool, bias: bool, last: str) -> None:
    head = make_head(linears, norm, bias, last)
    rebuilt = load_head(head.state_dict(), 5, "relu")
    assert str(rebuilt) == str(head)
    x = torch.randn(3, 5)
    assert torch.equal(rebuilt.eval()(x), head(x))
    assert str(build_head(rebuilt, 5)) == str(head)


def test_one_linear_layer_by_itself() -> None:
    layer = nn.Linear(5, 4)
    rebuilt = load_head(layer.state_dict(), 5, "relu")
    x = torch.randn(3, 5)
    assert torch.equal(rebuilt(x), layer(x))
    with pytest.raises(ValueError, match=r"of another shape: bias"):
        load_head({"weight": torch.ones(4, 5), "bias": torch.ones(3)}, 5, "relu")


def test_batch_norm_of_a_student() -> None:
    bare, normalised = make_head(3, False, True, "plain"), make_head(3, True, True, "plain")
    assert str(build_head(bare, 5, batch_norm=True)) == str(normalised)
    assert str(build_head(normalised, 5, batch_norm=False)) == str(bare)
    assert build_head(normalised, 7)(torch.randn(3, 7)).shape == (3, 4)


@pytest.mark.parametrize(
    ("key", "shape", "says"),
    [
        ("0.weight", None, "missing: h.0.weight"),
        ("4.gain", (1,), "unexpected: h.4.gain"),
        ("7.weight", (3,), "unexpected: h.7.weight"),
        ("999999999999.weight", (3, 4), "unexpected: h.999999999999.weight"),
        ("0.weight", (7, 5), "of another shape: h.0.bias, h.2.weight"),
        ("0.weight", (6, 3), "of another shape: h.0.weight"),
    ],
)
def test_odd_weights(key: str, shape: tuple[int, ...] | None, says: str) -> None:
    shapes = {"0.weight": (6, 5), "0.bias": (6,), "2.weight": (4, 6), "2.bias": (4,), key: shape}
    weights = {k: torch.ones(s) for k, s in shapes.items() if s is not None}
    with pytest.raises(ValueError, match=says):
        load_head(weights, 5, "relu", "h.")
