"""Vectors computed independently with numpy; the official code's values among them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import protocpc_loss_func, protocpc_step, seed_loss_func, seed_terms
from solo_ext.memory import PrototypePrior, Prototypes, sinkhorn

VECTORS = json.loads((Path(__file__).parent.parent / "oracles" / "distillation.json").read_text())
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)


def case(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = next(c for c in VECTORS[group]["cases"] if c["name"] == name)
    return found["inputs"], found["expected"]


def names(group: str, *but: str) -> Any:
    return pytest.mark.parametrize(
        "name", [c["name"] for c in VECTORS[group]["cases"] if c["name"] not in but]
    )


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


@DTYPES
@names("sinkhorn", "global_shift_exact_per_sample_shift_not", "two_ranks")
def test_sinkhorn(name: str, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("sinkhorn", name)
    scores = torch.tensor(given["scores_BxK"], dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"])
    assert found.dtype == dtype
    close(found, expected["assignment"], tolerance)
    close(found.sum(1), expected["row_sums"], tolerance)
    close(found.sum(0), expected["prototype_mass"], tolerance)


@DTYPES
@pytest.mark.parametrize("unit", [False, True])
def test_sinkhorn_is_that_of_unshifted_scores(
    unit: bool, dtype: torch.dtype, tolerance: float
) -> None:
    given, expected = case("sinkhorn", "global_shift_exact_per_sample_shift_not")
    scores = torch.tensor(next(v for k, v in given.items() if "scores" in k), dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"], unit=unit)
    close(found, expected["no_shift"], tolerance)


@DTYPES
def test_sinkhorn_of_the_joined_batch(dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("sinkhorn", "two_ranks")
    scores = torch.tensor(given["scores_rank0"] + given["scores_rank1"], dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"])
    close(found, expected["assignment_all_samples"], tolerance)


def probabilities(given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    logits = torch.tensor(given["teacher_logits"], dtype=dtype)
    if given.get("assignment", "softmax") == "softmax":
        return (logits / given["tau_t"]).softmax(1)
    return sinkhorn(logits, given["tau_t"], 3)


@DTYPES
@names("protocpc", "identity_uniform_prior_equals_soft_cross_entropy", "prior_two_ranks_uneven")
def test_protocpc(name: str, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("protocpc", name)
    probs = probabilities(given, dtype)
    close(probs, expected["p_t"], tolerance)
    before = torch.tensor(given["prior_before"], dtype=dtype)
    prior = PrototypePrior(len(before), given["momentum"]).to(dtype)
    prior.commit_(before)
    close(prior.peek(probs), expected["prior_used"], tolerance)
    close(prior.value, before, 0)
    prior.update_(probs)
    close(prior.value, expected["prior_after"], tolerance)
    logits = torch.tensor(given["student_logits"], dtype=dtype, requires_grad=True)
    loss = protocpc_loss_func(logits, probs, prior.value, given["tau_s"])
    assert loss.dtype == dtype
    close(loss, expected["loss"], tolerance)
    close(loss, sum(expected["loss_align"] + expected["loss_unif"]) / len(logits), tolerance)
    (gradient,) = torch.autograd.grad(loss, logits)
    close(gradient, expected["grad_wrt_student_logits"], tolerance)


def features_of(logits: Tensor, length: float = 2.0) -> tuple[Tensor, Tensor]:
    """Unit rows and prototypes whose cosines are ``logits`` over ``length``."""
    width = logits.shape[1]
    rest = (length**2 - logits.square().sum(1, keepdim=True)).sqrt()
    rows = F.normalize(torch.cat((logits, rest), 1), dim=1)
    return rows, torch.eye(width + 1, dtype=logits.dtype)[:width]


@DTYPES
@names("protocpc", "identity_uniform_prior_equals_soft_cross_entropy", "prior_two_ranks_uneven")
def test_protocpc_step(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """From features whose cosines are half the vector's logits, at half its temperatures."""
    given, expected = case("protocpc", name)
    both = (torch.tensor(given[f"{who}_logits"], dtype=dtype) for who in ("student", "teacher"))
    (student, prototypes), (teacher, _) = (features_of(logits) for logits in both)
    softmax = given["assignment"] == "softmax"
    terms = protocpc_step(
        student.unsqueeze(0),
        teacher.unsqueeze(0),
        prototypes,
        torch.tensor(given["prior_before"], dtype=dtype),
        student_temperature=given["tau_s"] / 2,
        teacher_temperature=given["tau_t"] / 2,
        assignment="softmax" if softmax else "sinkhorn",
        prior_momentum=given["momentum"],
    )
    close(terms.loss, expected["loss"], tolerance)
    close(terms.align, sum(expected["loss_align"]) / len(student), tolerance)
    close(terms.unif, sum(expected["loss_unif"]) / len(student), tolerance)
    close(terms.prior, expected["prior_after"], tolerance)


@DTYPES
def test_flat_prior_is_soft_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("protocpc", "identity_uniform_prior_equals_soft_cross_entropy")
    probs, count = probabilities(given, dtype), len(given["prior_used"])
    logits = torch.tensor(given["student_logits"], dtype=dtype)
    prior = torch.tensor(given["prior_used"], dtype=dtype)
    loss = protocpc_loss_func(logits, probs, prior, given["tau_s"])
    close(loss, expected["protocpc_loss"], tolerance)
    close(loss, expected["soft_cross_entropy"], tolerance)
    lower = protocpc_loss_func(logits, probs, prior / count, given["tau_s"])
    close(lower, expected["with_prior_summing_to_one"], tolerance)
    close(math.log(count) - loss, expected["mutual_information_lower_bound"], tolerance)


@DTYPES
def test_prior_of_the_joined_batch(dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("protocpc", "prior_two_ranks_uneven")
    rows = given["teacher_logits_rank0"] + given["teacher_logits_rank1"]
    probs = probabilities({**given, "teacher_logits": rows}, dtype)
    prior = PrototypePrior(3, given["momentum"]).to(dtype)
    prior.update_(probs)
    close(prior.value, expected["prior_after"], tolerance)


def seed_inputs(given: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    student, teacher, queue = (
        torch.tensor(given[n], dtype=dtype) for n in ("student", "teacher", "queue_dxK")
    )
    return student, teacher, queue.T


@DTYPES
@names("seed", "multi_crop_sum")
def test_seed(name: str, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("seed", name)
    inputs = seed_inputs(given, dtype)
    terms = seed_terms(*inputs, given["tau_s"], given["tau_t"])
    assert terms.loss.dtype == dtype
    close(terms.loss, expected["loss"], tolerance)
    if "teacher_entropy" in expected:
        close(terms.entropy, expected["teacher_entropy"], tolerance)
    if "teacher_probabilities" in expected:
        targets = torch.tensor(expected["teacher_probabilities"], dtype=torch.float64)
        close(terms.own, targets[:, 0].mean(), tolerance)
        close(terms.entropy, torch.special.entr(targets).sum(1).mean(), tolerance)


@DTYPES
def test_seed_of_two_crops(dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("seed", "multi_crop_sum")
    temperatures = given["tau_s"], given["tau_t"]
    large = seed_loss_func(*seed_inputs(given["global_"], dtype), *temperatures)
    small = seed_loss_func(*seed_inputs(given["small"], dtype), *temperatures)
    close(large, expected["loss_global"], tolerance)
    close(small, expected["loss_small"], tolerance)
    close(large + small, expected["total"], tolerance)


@DTYPES
@pytest.mark.parametrize("rows", ["weight_v", "product"])
def test_prototypes_of_weight_norm(rows: str, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case("weight_norm_prototypes", "K2_D2")
    given["product"] = expected["weight"]
    held = Prototypes.from_rows(torch.tensor(given[rows], dtype=dtype))
    assert held.weight.dtype == dtype
    close(held.weight.detach(), expected["unit_prototypes"], tolerance)
