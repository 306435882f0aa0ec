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

from solo_ext import losses
from solo_ext.clustering import cluster_concentration
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
from solo_ext.losses.protocpc import protocpc_loss_func, protocpc_step
from solo_ext.losses.seed import seed_loss_func, seed_terms
from solo_ext.memory import PrototypePrior, Prototypes, sinkhorn
from solo_ext.memory.features import FeatureBank, FeatureQueue

VECTORS: dict[str, Any] = {}
for file in (Path(__file__).parent.parent / "oracles").glob("*.json"):
    VECTORS[file.stem] = json.loads(file.read_text())
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
Case = dict[str, Any]


def named(file: str, group: str) -> dict[str, Case]:
    held = VECTORS[file][group]
    held = held["cases"] if isinstance(held, dict) else held
    return {case.get("name", case.get("id")): case for case in held}


def cases(file: str, group: str, *but: str) -> Any:
    held = {name: case for name, case in named(file, group).items() if name not in but}
    return pytest.mark.parametrize("case", held.values(), ids=held)


def given(case: Case, *names: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(case[n], dtype=dtype, requires_grad=True) for n in names]


def unit(degrees: list[float], dtype: torch.dtype) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack((angles.cos(), angles.sin()), 1).to(dtype)


def close(found: Any, expected: Any, tolerance: float, dtype: torch.dtype | None = None) -> None:
    """``dtype``: that found must have."""
    assert dtype is None or found.dtype == dtype
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=tolerance)


def gradients_close(
    loss: Tensor, inputs: list[Tensor], expected: list[Any], tolerance: float
) -> None:
    for found, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        close(found, wanted, tolerance)


@DTYPES
@cases("contrastive", "ntxent_simclr")
def test_nt_xent(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    loss = nt_xent_loss_func(*views, case["temperature"])
    close(loss, case["loss"], tolerance, dtype)
    terms = contrastive(**batch_of_views(views)._asdict(), temperature=case["temperature"])
    close(terms.losses[:, 0], case["per_anchor"], tolerance)


@DTYPES
@cases("contrastive", "debiased_M1")
def test_debiased(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    temperature, tau_plus = case["temperature"], case["tau_plus"]
    loss = debiased_loss_func(*views, temperature, tau_plus)
    close(loss, case["loss"], tolerance, dtype)
    gradients_close(loss, views, [case["grad_z1"], case["grad_z2"]], tolerance)
    terms = two_view_terms(*views, temperature, NegativeEstimator(tau_plus))
    close(terms.losses[:, 0], case["per_anchor"], tolerance)
    close(terms.clamped, sum(case["clamped"]) / len(case["clamped"]), tolerance)
    # The cosine at which N samples together weigh what the estimate says.
    hardness = temperature * (torch.tensor(case["Ng"], dtype=torch.float64) / case["N"]).log()
    close(terms.hardness, hardness.mean(), tolerance)


@DTYPES
@cases("contrastive", "debiased_general_M")
def test_debiased_with_several_samples_of_the_positive(
    case: Case, dtype: torch.dtype, tolerance: float
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
    assert terms.clamped == (case["g_raw"] < math.exp(-1 / temperature))
    close((terms.hardness.double() / temperature).exp(), case["g"], tolerance)


@DTYPES
@pytest.mark.parametrize("detached", [False, True])
@cases("contrastive", "hard_negative_HCL")
def test_hard_negative(case: Case, detached: bool, dtype: torch.dtype, tolerance: float) -> None:
    views = given(case, "z1", "z2", dtype=dtype)
    settings = case["tau_plus"], case["beta"], detached
    loss = hard_negative_loss_func(*views, case["temperature"], *settings)
    close(loss, case["loss"], tolerance, dtype)
    suffix = "_if_weights_detached" if detached else ""
    expected = [case[f"grad_z{view}{suffix}"] for view in (1, 2)]
    gradients_close(loss, views, expected, tolerance)
    terms = two_view_terms(*views, case["temperature"], NegativeEstimator(*settings))
    close(terms.losses[:, 0], case["per_anchor"], tolerance)
    close(terms.clamped, sum(case["clamped"]) / len(case["clamped"]), tolerance)


@DTYPES
@cases("contrastive", "mochi")
def test_mochi(case: Case, dtype: torch.dtype, tolerance: float) -> None:
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
    close(loss, case["loss"], tolerance, dtype)
    gradients_close(loss, [query], [case["grad_q"]], tolerance)
    # A queue that learns takes another way to the same numbers.
    loss = mochi_loss_func(query, key, queue, **settings)
    close(loss, case["loss"], tolerance)
    gradients_close(loss, [query], [case["grad_q"]], tolerance)
    if case["name"] == "d_no_synthetic_equals_moco":
        close(info_nce_loss_func(query, key, queue, case["temperature"]), case["loss"], tolerance)


@DTYPES
@cases("contrastive", "nnclr_loss")
def test_nnclr(case: Case, dtype: torch.dtype, tolerance: float) -> None:
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
    case, _ = VECTORS["contrastive"]["nnclr_step"]
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
@cases("contrastive", "infonce")
def test_info_nce(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """Logits as cosines over a temperature of 0.1."""
    logits = case["logits"][:]
    order = [logits.pop(case["positive"]), *logits]
    rows = unit([math.degrees(math.acos(value / 10)) for value in order], dtype)
    loss = info_nce_loss_func(unit([0.0], dtype), rows[:1], rows[1:], 0.1)
    close(loss, case["loss"], tolerance)


@DTYPES
@cases("metric", "contrastive_pair")
def test_pairs(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.tensor([case["x"]], dtype=dtype, requires_grad=True)
    y = torch.tensor([case["y"]], dtype=dtype)
    same = torch.tensor([bool(case["same"])])
    loss = losses.contrastive_loss_func(x, y, same, case["margin"])
    close(loss, case["loss"], tolerance, dtype)
    (gradient,) = torch.autograd.grad(loss, x)
    close(gradient, [case["grad_x"]], tolerance, dtype)


@DTYPES
@cases("metric", "triplet")
def test_triplet(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    rows = [torch.tensor([case[n]], dtype=dtype) for n in ("a", "p", "n")]
    for squared in (True, False):
        loss = losses.triplet_loss_func(*rows, case["margin"], squared)
        close(loss, case["loss_squared" if squared else "loss_unsquared"], tolerance, dtype)


@DTYPES
@cases("metric", "lifted_structured")
def test_lifted_structured(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x, targets = torch.tensor(case["x"], dtype=dtype), torch.tensor(case["y"])
    for smooth in (True, False):
        loss = losses.lifted_structured_loss_func(x, targets, case["margin"], smooth)
        close(loss, case["loss_smooth" if smooth else "loss_max"], tolerance, dtype)


@DTYPES
@cases("metric", "n_pair")
def test_n_pair(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    anchor, positive = (torch.tensor(case[n], dtype=dtype) for n in ("anchor", "positive"))
    close(losses.n_pair_loss_func(anchor, positive), case["loss"], tolerance, dtype)
    expected = case["loss"] + 0.3 * case["l2reg_unweighted"]
    close(losses.n_pair_loss_func(anchor, positive, 0.3), expected, tolerance, dtype)


@DTYPES
@cases("metric", "nce")
def test_nce(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    data = torch.tensor(case["logit_data"], dtype=dtype).reshape(-1)
    noise = torch.tensor(case["logit_noise"], dtype=dtype)
    if "K" in case:
        noise = noise.view(-1, case["K"])
    close(losses.nce_loss_func(data, noise), case["loss"], tolerance, dtype)


@DTYPES
@cases("metric", "clip_symmetric")
def test_clip(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    image, text = (torch.tensor(case[n], dtype=dtype) for n in ("image", "text"))
    for scale in (case["logit_scale"], torch.tensor(case["logit_scale"], dtype=dtype)):
        loss = losses.clip_loss_func(image, text, scale)
        close(loss, case["loss"], tolerance, dtype)


@DTYPES
@cases("metric", "soft_nearest_neighbour")
def test_soft_nearest_neighbor(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x, targets = torch.tensor(case["x"], dtype=dtype), torch.tensor(case["y"])
    distance: Any = {"sqeuclid": "sqeuclidean", "cos_sim": "cosine"}[case["distance"]]
    loss = losses.soft_nearest_neighbor_loss_func(x, targets, case["temperature"], distance)
    close(loss, case["loss_mean_over_valid_anchors"], tolerance, dtype)


@DTYPES
@cases("metric", "angular_margin")
def test_margins(case: Case, dtype: torch.dtype, tolerance: float) -> None:
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
    close(loss, case["loss"], tolerance, dtype)


@DTYPES
@cases("metric", "align_uniform")
def test_alignment_and_uniformity(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x, y, points = (torch.tensor(case[n], dtype=dtype) for n in ("x", "y", "uniform_points"))
    close(losses.alignment_loss_func(x, y), case["align_alpha2"], tolerance, dtype)
    close(losses.uniformity_loss_func(points), case["uniform_t2"], tolerance, dtype)


OTHERS = "identity_uniform_prior_equals_soft_cross_entropy", "prior_two_ranks_uneven"
"""Cases of other inputs."""


def of(group: str, name: str) -> tuple[Case, Case]:
    """Inputs and expected values of a case of distillation."""
    case = named("distillation", group)[name]
    return case["inputs"], case["expected"]


@DTYPES
@cases("distillation", "sinkhorn", "global_shift_exact_per_sample_shift_not", "two_ranks")
def test_sinkhorn(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case["inputs"], case["expected"]
    scores = torch.tensor(given["scores_BxK"], dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"])
    assert found.dtype == dtype
    close(found, expected["assignment"], tolerance)
    close(found.sum(1), expected["row_sums"], tolerance)
    close(found.sum(0), expected["prototype_mass"], tolerance)


@DTYPES
@pytest.mark.parametrize("unit", [False, True])
def test_sinkhorn_of_cosines(unit: bool, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = of("sinkhorn", "global_shift_exact_per_sample_shift_not")
    scores = torch.tensor(next(v for k, v in given.items() if "scores" in k), dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"], unit=unit)
    close(found, expected["no_shift"], tolerance)


@DTYPES
def test_sinkhorn_of_the_joined_batch(dtype: torch.dtype, tolerance: float) -> None:
    given, expected = of("sinkhorn", "two_ranks")
    scores = torch.tensor(given["scores_rank0"] + given["scores_rank1"], dtype=dtype)
    found = sinkhorn(scores, given["epsilon"], given["iterations"])
    close(found, expected["assignment_all_samples"], tolerance)


def probabilities(given: Case, dtype: torch.dtype) -> Tensor:
    logits = torch.tensor(given["teacher_logits"], dtype=dtype)
    if given.get("assignment", "softmax") == "softmax":
        return (logits / given["tau_t"]).softmax(1)
    return sinkhorn(logits, given["tau_t"], 3)


@DTYPES
@cases("distillation", "protocpc", *OTHERS)
def test_protocpc(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case["inputs"], case["expected"]
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
@cases("distillation", "protocpc", *OTHERS)
def test_protocpc_step(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """From features whose cosines are half the vector's logits, at half its temperatures."""
    given, expected = case["inputs"], case["expected"]
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
    given, expected = of("protocpc", "identity_uniform_prior_equals_soft_cross_entropy")
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
    given, expected = of("protocpc", "prior_two_ranks_uneven")
    rows = given["teacher_logits_rank0"] + given["teacher_logits_rank1"]
    probs = probabilities({**given, "teacher_logits": rows}, dtype)
    prior = PrototypePrior(3, given["momentum"]).to(dtype)
    prior.update_(probs)
    close(prior.value, expected["prior_after"], tolerance)


def seed_inputs(given: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    student, teacher, queue = (
        torch.tensor(given[n], dtype=dtype) for n in ("student", "teacher", "queue_dxK")
    )
    return student, teacher, queue.T


@DTYPES
@cases("distillation", "seed", "multi_crop_sum")
def test_seed(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case["inputs"], case["expected"]
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
    given, expected = of("seed", "multi_crop_sum")
    temperatures = given["tau_s"], given["tau_t"]
    large = seed_loss_func(*seed_inputs(given["global_"], dtype), *temperatures)
    small = seed_loss_func(*seed_inputs(given["small"], dtype), *temperatures)
    close(large, expected["loss_global"], tolerance)
    close(small, expected["loss_small"], tolerance)
    close(large + small, expected["total"], tolerance)


@DTYPES
@pytest.mark.parametrize("rows", ["weight_v", "product"])
def test_prototypes_of_weight_norm(rows: str, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = of("weight_norm_prototypes", "K2_D2")
    given["product"] = expected["weight"]
    held = Prototypes.from_rows(torch.tensor(given[rows], dtype=dtype))
    assert held.weight.dtype == dtype
    close(held.weight.detach(), expected["unit_prototypes"], tolerance)


def proto_nce(given: Case, query: Tensor, dtype: torch.dtype, collisions: str) -> Tensor:
    return losses.proto_nce_loss_func(
        query,
        torch.tensor(given["prototypes"], dtype=dtype),
        torch.tensor(given["phi"], dtype=dtype),
        torch.tensor(given["positive_ids"]),
        torch.tensor(given["negative_ids"], dtype=torch.long),
        collisions,  # type: ignore[arg-type]
    )


@DTYPES
@cases("pcl", "pcl_infonce")
def test_info_nce_of_pcl(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given = case["inputs"]
    query, key, queue = (torch.tensor(given[n], dtype=dtype) for n in ("q", "k", "queue_dxr"))
    loss = info_nce_loss_func(query, key, queue.T, given["temperature"])
    assert loss.dtype == dtype
    close(loss, case["expected"]["loss"], tolerance)


@DTYPES
@cases("pcl", "pcl_protonce_single_set")
def test_proto_nce(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    query = torch.tensor(case["inputs"]["q"], dtype=dtype)
    expected = case["expected"]
    if "loss" in expected:
        close(proto_nce(case["inputs"], query, dtype, "paper"), expected["loss"], tolerance)
        return
    official = proto_nce(case["inputs"], query, dtype, "paper")
    close(official, expected["loss_official"], tolerance)
    merged = proto_nce(case["inputs"], query, dtype, "merge")
    close(merged, expected["loss_if_duplicate_columns_are_merged"], tolerance)


@DTYPES
@cases("pcl", "pcl_total")
def test_total(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case["inputs"], case["expected"]
    query, key, queue = (torch.tensor(given[n], dtype=dtype) for n in ("q", "k", "queue_dxr"))
    info = info_nce_loss_func(query, key, queue.T, given["temperature"])
    proto = [proto_nce(one, query, dtype, "paper") for one in given["sets"]]
    close(torch.stack(proto), expected["protonce"], tolerance)
    close(info + torch.stack(proto).mean(), expected["total"], tolerance)
    close(info, expected["total_during_warmup"], tolerance)


@DTYPES
@cases("pcl", "pcl_concentration")
def test_concentration(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given = case["inputs"]
    by_cluster = given["distances_by_cluster"]
    distances = torch.tensor([d for members in by_cluster for d in members], dtype=dtype)
    sizes = torch.tensor([len(members) for members in by_cluster])
    assignments = torch.arange(len(by_cluster)).repeat_interleave(sizes)
    # Its alpha of 10 is the default.
    found = cluster_concentration(distances, assignments, len(by_cluster), given["temperature"])
    assert found.dtype == dtype
    expected = case["expected"]["phi"]
    if None in expected or any(value != value for value in expected):
        # The official formula is 0 / 0 here; every prototype gets the temperature instead.
        expected = [given["temperature"]] * len(by_cluster)
    close(found, expected, tolerance)


@DTYPES
@cases("pcl", "pcl_feature_gather")
def test_padded_samples_count_once(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """A sample that two ranks embedded is overwritten by an equal row, not added to."""
    bank = FeatureBank(2).to(dtype)
    bank.resize_(3)
    for rows in case["inputs"].values():
        indices = torch.tensor([int(i) for i in rows])
        bank.update_(indices, torch.tensor(list(rows.values()), dtype=dtype))
    close(bank.value, case["expected"]["fixed"], tolerance)
    assert bank.filled.all()


@DTYPES
@cases("pcl", "moco_queue")
def test_queue(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    queue = FeatureQueue(4, 1).to(dtype)
    queue.value.copy_(torch.tensor(case["inputs"]["initial_queue"]).T)
    for keys, expected in zip(case["inputs"]["keys_per_step"], case["expected"], strict=True):
        queue.update_(torch.tensor(keys, dtype=dtype).unsqueeze(1))
        assert torch.equal(queue.value, torch.tensor(expected["queue"], dtype=dtype).T)
        assert queue.pointer == expected["ptr"]
