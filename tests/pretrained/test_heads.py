"""Heads rebuilt from their weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from solo_ext.pretrained.heads import HeadSpec, build_head, load_head

SPECS = [
    HeadSpec(
        linears=linears,
        hidden_dim=6 if linears > 1 else 0,
        out_dim=4,
        activation="relu",
        batch_norm=batch_norm and linears > 1,
        hidden_bias=bias and linears > 1,
        out_bias=not bias,
        last_batch_norm=last,  # type: ignore[arg-type]
    )
    for linears, batch_norm, bias, last in product(
        (1, 2, 3), (True, False), (True, False), ("none", "affine", "plain")
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_layers_are_told_from_the_weights(spec: HeadSpec) -> None:
    head = build_head(spec, 5).eval()
    for buffer in head.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    rebuilt, found = load_head(head.state_dict(), 5, "relu")
    assert found == spec
    x = torch.randn(3, 5)
    assert torch.equal(rebuilt.eval()(x), head(x))


def test_one_linear_layer_by_itself() -> None:
    layer = nn.Linear(5, 4)
    rebuilt, spec = load_head(layer.state_dict(), 5, "relu")
    x = torch.randn(3, 5)
    assert torch.equal(rebuilt(x), layer(x))
    assert (spec.linears, spec.out_dim) == (1, 4)
    with pytest.raises(ValueError, match=r"of another shape: bias"):
        load_head({"weight": torch.ones(4, 5), "bias": torch.ones(3)}, 5, "relu")


def test_what_it_is_made_of() -> None:
    spec = HeadSpec(linears=3, hidden_dim=6, out_dim=4, activation="gelu")
    kinds = [type(part) for part in build_head(spec, 5)]
    assert kinds == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    normalised = [type(part) for part in build_head(spec, 5, batch_norm=True)]
    assert normalised == [*(nn.Linear, nn.BatchNorm1d, nn.GELU) * 2, nn.Linear]
    plain = build_head(HeadSpec(**{**vars(spec), "batch_norm": True}), 5, batch_norm=False)
    assert [type(part) for part in plain] == kinds
    assert str(spec) == "6-6-4 gelu"


@pytest.mark.parametrize(
    ("key", "shape", "says"),
    [
        ("0.weight", None, "missing: h.0.weight"),
        ("4.gain", (1,), "unexpected: h.4.gain"),
        ("7.weight", (3,), "unexpected: h.7.weight"),
        ("0.weight", (7, 5), "of another shape: h.0.bias, h.2.weight"),
        ("2.weight", (4, 7), "of another shape: h.2.weight"),
        ("0.bias", (6, 1), "of another shape: h.0.bias"),
        ("0.weight", (6, 3), "of another shape: h.0.weight"),
    ],
)
def test_odd_weights(key: str, shape: tuple[int, ...] | None, says: str) -> None:
    shapes = {"0.weight": (6, 5), "0.bias": (6,), "2.weight": (4, 6), "2.bias": (4,), key: shape}
    weights = {k: torch.ones(s) for k, s in shapes.items() if s is not None}
    with pytest.raises(ValueError, match=says):
        load_head(weights, 5, "relu", "h.")
