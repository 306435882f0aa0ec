"""The losses' names, arguments, defaults and papers, which configs and users write."""

from __future__ import annotations

import inspect

import pytest

from solo_ext import losses
from solo_ext.losses import LOSSES

TABLE = {
    "nt_xent_loss_func": ("z1, z2, temperature=0.5", "2002.05709"),
    "info_nce_loss_func": (
        "query, positive, negatives, temperature=0.2, compute_dtype=None",
        "1911.05722",
    ),
    "debiased_loss_func": ("z1, z2, temperature=0.5, tau_plus=0.1", "2007.00224"),
    "hard_negative_loss_func": (
        "z1, z2, temperature=0.5, tau_plus=0.1, beta=1.0, detach_weights=False",
        "2010.04592",
    ),
    "mochi_loss_func": (
        "query, positive, queue, temperature=0.2, num_hard=1024, num_pair_mixes=1024, "
        "num_query_mixes=128, draws=None",
        "2010.01028",
    ),
    "nnclr_symmetric_loss_func": ("nn, p, temperature=0.1, symmetric=True", "2104.14548"),
    "proto_nce_loss_func": (
        "query, prototypes, concentration, positive_ids, negative_ids=None, collisions=paper, "
        "compute_dtype=None",
        "2005.04966",
    ),
    "protocpc_loss_func": ("student_logits, teacher_probs, prior, temperature=0.1", ""),
    "seed_loss_func": (
        "student, teacher, queue, student_temperature=0.2, teacher_temperature=0.01, "
        "compute_dtype=None",
        "2101.04731",
    ),
    "clip_loss_func": ("image, text, logit_scale", "2103.00020"),
    "contrastive_loss_func": ("x, y, same, margin=1.0", ""),
    "triplet_loss_func": ("anchor, positive, negative, margin=1.0, squared=True", "1503.03832"),
    "lifted_structured_loss_func": ("x, targets, margin=1.0, smooth=True", "1511.06452"),
    "n_pair_loss_func": ("anchor, positive, l2_reg=0.0", ""),
    "nce_loss_func": ("data_logits, noise_logits", ""),
    "soft_nearest_neighbor_loss_func": (
        "x, targets, temperature=1.0, distance=sqeuclidean",
        "1902.01889",
    ),
    "bilinear_info_nce_loss_func": ("query, context, weight, temperature=1.0", "1807.03748"),
    "arcface_loss_func": ("cosine, target, scale=64.0, margin=0.5, monotone=True", "1801.07698"),
    "cosface_loss_func": ("cosine, target, scale=64.0, margin=0.35", "1801.09414"),
    "sphereface_loss_func": (
        "cosine, target, scale=1.0, margin=4, feature_norm=None, annealing=0.0",
        "1704.08063",
    ),
    "alignment_loss_func": ("x, y, alpha=2", "2005.10242"),
    "uniformity_loss_func": ("x, t=2", "2005.10242"),
}


def test_all_are_registered() -> None:
    assert {n for n in LOSSES if LOSSES[n].origin == "solo_ext"} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_arguments(name: str) -> None:
    arguments, arxiv = TABLE[name]
    entry = LOSSES[name]
    assert entry.target is getattr(losses, name)
    assert entry.arxiv == arxiv
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in inspect.signature(entry.target).parameters.values()
    ]
    assert ", ".join(found) == arguments
