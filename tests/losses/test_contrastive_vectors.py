"""Vectors computed independently with numpy: values, gradients, anchors on the floor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import (
    NegativeEstimator,
    batch_of_views,
    contrastive,
    debiased_loss_func,
    hard_negative_loss_func,
    nt_xent_loss_func,
    two_view_terms,
)
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.mochi import mochi_loss_func
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func, nnclr_terms

VECTORS = json.loads((Path(__file__).parent.parent / "oracles" / "contrastive.json").read_text())
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)


def cases(group: str) -> Any:
    return pytest.mark.parametrize("case", VECTORS[group], ids=lambda c: c["name"])


def given(case: dict[str, Any], *names: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(case[n], dtype=dtype, requires_grad=True) for n in names]


def unit(degrees: list[float], dtype: torch.dtype) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack((angles.cos(), angles.sin()), 1).to(dtype)


def close(found: Tensor, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        found.detach().double(),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def gradients_close(
    loss: Tensor, inputs: list[Tensor], expected: list[Any], tolerance: float
) -> None:
    for found, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        close(found, wanted, tolerance)


@DTYPES
@cases("ntxent_simclr")
def test_nt_xent(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    loss = nt_xent_loss_func(*views, case["temperature"])
    assert loss.dtype == dtype
    close(loss, case["loss"], tolerance)
    terms = contrastive(**batch_of_views(views)._asdict(), temperature=case["temperature"])
    close(terms.losses[:, 0], case["per_anchor"], tolerance)


@DTYPES
@cases("debiased_M1")
def test_debiased(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    temperature, tau_plus = case["temperature"], case["tau_plus"]
    loss = debiased_loss_func(*views, temperature, tau_plus)
    assert loss.dtype == dtype
    close(loss, case["loss"], tolerance)
    gradients_close(loss, views, [case["grad_z1"], case["grad_z2"]], tolerance)
    terms = two_view_terms(*views, temperature, NegativeEstimator(tau_plus))
    close(terms.losses[:, 0], case["per_anchor"], tolerance)
    close(terms.floored, sum(case["clamped"]) / len(case["clamped"]), tolerance)
    # The cosine at which N samples together weigh what the estimate says.
    hardness = temperature * (torch.tensor(case["Ng"], dtype=torch.float64) / case["N"]).log()
    close(terms.hardness, hardness.mean(), tolerance)


@DTYPES
@cases("debiased_general_M")
def test_debiased_with_several_samples_of_the_positive(
    case: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    temperature, estimator = case["temperature"], NegativeEstimator(case["tau_plus"])
    anchor, samples, negatives = (
        unit(case[n] if n != "anchor_deg" else [case[n]], dtype)
        for n in ("anchor_deg", "v_deg", "u_deg")
    )
    assert case["v_deg"][0] == case["positive_deg"]
    terms = contrastive(
        anchor, samples.unsqueeze(0), negatives, estimator=estimator, temperature=temperature
    )
    close(terms.losses[0, 0], case["loss"], tolerance)
    assert terms.floored == (case["g_raw"] < math.exp(-1 / temperature))
    close((terms.hardness.double() / temperature).exp(), case["g"], tolerance)


@DTYPES
@pytest.mark.parametrize("detached", [False, True])
@cases("hard_negative_HCL")
def test_hard_negative(
    case: dict[str, Any], detached: bool, dtype: torch.dtype, tolerance: float
) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    settings = case["tau_plus"], case["beta"], detached
    loss = hard_negative_loss_func(*views, case["temperature"], *settings)
    assert loss.dtype == dtype
    close(loss, case["loss"], tolerance)
    suffix = "_if_weights_detached" if detached else ""
    expected = [case[f"grad_z{view}{suffix}"] for view in (1, 2)]
    gradients_close(loss, views, expected, tolerance)
    terms = two_view_terms(*views, case["temperature"], NegativeEstimator(*settings))
    close(terms.losses[:, 0], case["per_anchor"], tolerance)
    close(terms.floored, sum(case["clamped"]) / len(case["clamped"]), tolerance)


@DTYPES
@cases("mochi")
def test_mochi(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    query, key, queue = given(case, "q", "k", "queue", dtype=dtype)
    rows = len(query)
    draws = MixDraws(
        torch.tensor(case["pair_indices_into_topN"], dtype=torch.long).view(rows, -1, 2),
        torch.tensor(case["alpha"], dtype=dtype),
        torch.tensor(case["single_indices_into_topN"], dtype=torch.long).view(rows, -1),
        torch.tensor(case["beta"], dtype=dtype),
    )
    settings: Any = {"temperature": case["temperature"], "num_hard": case["N"], "draws": draws}
    loss = mochi_loss_func(query, key, queue.detach(), **settings)
    assert loss.dtype == dtype
    close(loss, case["loss"], tolerance)
    gradients_close(loss, [query], [case["grad_q"]], tolerance)
    # A queue that learns takes another way to the same numbers.
    loss = mochi_loss_func(query, key, queue, **settings)
    close(loss, case["loss"], tolerance)
    gradients_close(loss, [query], [case["grad_q"]], tolerance)
    if case["name"] == "d_no_synthetic_equals_moco":
        close(info_nce_loss_func(query, key, queue, case["temperature"]), case["loss"], tolerance)


@DTYPES
@cases("nnclr_loss")
def test_nnclr(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    nn, p = given(case, "nn", "p", dtype=dtype)
    row = nnclr_symmetric_loss_func(nn, p, case["temperature"], symmetric=False)
    assert row.dtype == dtype
    close(row, case["loss_row"], tolerance)
    gradients_close(row, [p], [case["grad_p_row"]], tolerance)
    _, rows = nnclr_terms(nn, p, case["temperature"])
    close(rows.losses[:, 0], case["row"], tolerance)
    # The column term is the row term with the roles exchanged.
    _, columns = nnclr_terms(p, nn, case["temperature"])
    close(columns.losses[:, 0], case["col"], tolerance)
    both = nnclr_symmetric_loss_func(nn, p, case["temperature"])
    close(both, case["loss_half_sum"], tolerance)
    close(2 * both, case["loss_row_plus_col"], tolerance)


@DTYPES
def test_nnclr_step(dtype: torch.dtype, tolerance: float) -> None:
    case, _ = VECTORS["nnclr_step"]
    z1, z2, p1, p2, queue = given(case, "z1", "z2", "p1", "p2", "queue", dtype=dtype)
    nearest = [(z @ queue.T).argmax(1) for z in (z1, z2)]
    assert [n.tolist() for n in nearest] == [case["nn1_index"], case["nn2_index"]]
    pairs = [(queue[nearest[0]], p2), (queue[nearest[1]], p1)]
    rows = [nnclr_symmetric_loss_func(*pair, case["temperature"], False) for pair in pairs]
    for found, name in zip(rows, ("row12", "row21"), strict=True):
        close(found, case[name], tolerance)
    close(torch.stack(rows).mean(), case["loss_solo"], tolerance)
    # The vector adds row and column of each direction; ours is half that sum, so that one weight
    # of the loss serves with the column term and without.
    both = [nnclr_symmetric_loss_func(*pair, case["temperature"]) for pair in pairs]
    close(2 * torch.stack(both).mean(), case["loss_paper_with_symmetric_term"], tolerance)
    for found, row, name in zip(both, rows, ("col12", "col21"), strict=True):
        close(2 * found - row, case[name], tolerance)


@DTYPES
@cases("infonce")
def test_info_nce(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Logits as cosines over a temperature of 0.1."""
    logits = case["logits"][:]
    order = [logits.pop(case["positive"]), *logits]
    rows = unit([math.degrees(math.acos(value / 10)) for value in order], dtype)
    loss = info_nce_loss_func(unit([0.0], dtype), rows[:1], rows[1:], 0.1)
    close(loss, case["loss"], tolerance)
