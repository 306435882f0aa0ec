"""Vectors of the classical losses, computed independently with numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext import losses

VECTORS = json.loads((Path(__file__).parent.parent / "oracles" / "metric.json").read_text())
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)


def cases(group: str) -> Any:
    return pytest.mark.parametrize("case", VECTORS[group], ids=lambda c: c["id"])


def close(found: Tensor, expected: Any, dtype: torch.dtype, tolerance: float) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance
    )


@DTYPES
@cases("contrastive_pair")
def test_contrastive(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    x = torch.tensor([case["x"]], dtype=dtype, requires_grad=True)
    y = torch.tensor([case["y"]], dtype=dtype)
    same = torch.tensor([bool(case["same"])])
    loss = losses.contrastive_loss_func(x, y, same, case["margin"])
    close(loss, case["loss"], dtype, tolerance)
    (gradient,) = torch.autograd.grad(loss, x)
    close(gradient, [case["grad_x"]], dtype, tolerance)


@DTYPES
@cases("triplet")
def test_triplet(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    rows = [torch.tensor([case[n]], dtype=dtype) for n in ("a", "p", "n")]
    for squared in (True, False):
        loss = losses.triplet_loss_func(*rows, case["margin"], squared)
        close(loss, case["loss_squared" if squared else "loss_unsquared"], dtype, tolerance)


@DTYPES
@cases("lifted_structured")
def test_lifted_structured(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    x, targets = torch.tensor(case["x"], dtype=dtype), torch.tensor(case["y"])
    for smooth in (True, False):
        loss = losses.lifted_structured_loss_func(x, targets, case["margin"], smooth)
        close(loss, case["loss_smooth" if smooth else "loss_max"], dtype, tolerance)


@DTYPES
@cases("n_pair")
def test_n_pair(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    anchor, positive = (torch.tensor(case[n], dtype=dtype) for n in ("anchor", "positive"))
    close(losses.n_pair_loss_func(anchor, positive), case["loss"], dtype, tolerance)
    expected = case["loss"] + 0.3 * case["l2reg_unweighted"]
    close(losses.n_pair_loss_func(anchor, positive, 0.3), expected, dtype, tolerance)


@DTYPES
@cases("nce")
def test_nce(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    data = torch.tensor(case["logit_data"], dtype=dtype).reshape(-1)
    noise = torch.tensor(case["logit_noise"], dtype=dtype)
    if "K" in case:
        noise = noise.view(-1, case["K"])
    close(losses.nce_loss_func(data, noise), case["loss"], dtype, tolerance)


@DTYPES
@cases("clip_symmetric")
def test_clip(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    image, text = (torch.tensor(case[n], dtype=dtype) for n in ("image", "text"))
    for scale in (case["logit_scale"], torch.tensor(case["logit_scale"], dtype=dtype)):
        loss = losses.clip_loss_func(image, text, scale)
        close(loss, case["loss"], dtype, tolerance)


@DTYPES
@cases("soft_nearest_neighbour")
def test_soft_nearest_neighbor(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    x, targets = torch.tensor(case["x"], dtype=dtype), torch.tensor(case["y"])
    distance: Any = {"sqeuclid": "sqeuclidean", "cos_sim": "cosine"}[case["distance"]]
    loss = losses.soft_nearest_neighbor_loss_func(x, targets, case["temperature"], distance)
    close(loss, case["loss_mean_over_valid_anchors"], dtype, tolerance)


@DTYPES
@cases("angular_margin")
def test_margins(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    cosine, target = torch.tensor(case["cos"], dtype=dtype), torch.tensor(case["y"])
    scale, margin = case["scale"] or 1.0, case["margin"]
    if case["kind"] == "cosface":
        loss = losses.cosface_loss_func(cosine, target, scale, margin)
    elif case["kind"] == "sphere":
        norm = torch.tensor(case["feature_norm"], dtype=dtype)
        loss = losses.sphereface_loss_func(cosine, target, scale, margin, norm)
    else:
        monotone = "plain" not in case["id"]
        loss = losses.arcface_loss_func(cosine, target, scale, margin, monotone)
    close(loss, case["loss"], dtype, tolerance)


@DTYPES
@cases("align_uniform")
def test_alignment_and_uniformity(
    case: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    x, y, points = (torch.tensor(case[n], dtype=dtype) for n in ("x", "y", "uniform_points"))
    close(losses.alignment_loss_func(x, y), case["align_alpha2"], dtype, tolerance)
    close(losses.uniformity_loss_func(points), case["uniform_t2"], dtype, tolerance)
