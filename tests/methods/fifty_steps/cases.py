"""What is compared: settings of the package, and what the pages say that these compute."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.methods.fifty_steps import loops
from tests.methods.fifty_steps.networks import head

SIZES = {"proj_hidden_dim": 16, "proj_output_dim": 8}
DEBIASED = {"temperature": 0.5, "tau_plus": 0.1, "beta": 0.0}
HARD = {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0}
QUEUE = {"queue_size": 20}
"""No multiple of the batch, so that a batch is written around its end."""
MIXING = {"num_hard": 6, "num_pair_mixes": 5, "num_query_mixes": 3, "warmup_epochs": 0}
PCL = {"temperature": 0.2, "proto_weight": 1.0, "alpha": 10.0, "warmup_epochs": 1}
SEED = {"student_temperature": 0.2, "teacher_temperature": 0.05, "small_weight": 0.7}
PROTOTYPES = {
    "student_temperature": 0.1,
    "teacher_temperature": 0.04,
    "prior_momentum": 0.9,
}
SINKHORN = {**PROTOTYPES, "iterations": 3}
CLUSTERS: dict[str, Any] = {
    **QUEUE,
    "warmup_epochs": 1,
    # Twenty starts find a local optimum now and then, and the loop the best one.
    "kmeans": {"restarts": 100},
}


@dataclass(frozen=True)
class Case:
    """A method of the package and the loop beside it.

    Args:
        method: its name.
        kwargs: of the method, where they are not the defaults of its page.
        loop: that computes the same.
        constants: of the loop; those that ``kwargs`` leave open are the page's defaults.
        projector: its layers.
        norm: whether networks have batch norm where they are made with it.
        views: large crops of each image.
        small: small ones.
        without_effect: constants that the settings leave nothing to do.
        known_clusters: whether the loop has the package's clusters, not the best ones.
    """

    method: str
    kwargs: dict[str, Any]
    loop: type[loops.Loop]
    constants: dict[str, float]
    projector: list[str] = field(default_factory=lambda: head(2, norm=True))
    norm: bool = True
    views: int = 2
    small: int = 0
    without_effect: tuple[str, ...] = ()
    known_clusters: bool = False


CASES: dict[str, Case] = {
    "debiased": Case("debiased", SIZES, loops.Batch, DEBIASED),
    # Where the floor of the estimate binds.
    "debiased at 0.2": Case(
        "debiased", {**SIZES, "temperature": 0.2}, loops.Batch, {**DEBIASED, "temperature": 0.2}
    ),
    "hard_negative": Case("hard_negative", SIZES, loops.Batch, HARD),
    "hard_negative of queues": Case(
        "hard_negative", {**SIZES, **QUEUE, "negatives": "queue"}, loops.Queues, HARD
    ),
    "mochi": Case(
        "mochi",
        {**SIZES, **QUEUE, "mixing": MIXING},
        loops.Queues,
        {"temperature": 0.2},
        head(2, norm=False),
    ),
    "nnclr_symmetric": Case(
        "nnclr_symmetric",
        {**SIZES, "pred_hidden_dim": 16, "support_set": {"size": 20}},
        loops.Neighbours,
        {"temperature": 0.1},
        head(3, norm=True, last_norm=True),
    ),
    "pcl": Case(
        "pcl",
        {**SIZES, **CLUSTERS, "num_prototypes": [3, 4]},
        loops.Clusters,
        PCL,
        head(2, norm=False),
    ),
    "pcl with drawn negatives": Case(
        "pcl",
        {**SIZES, **CLUSTERS, "num_prototypes": [10, 11], "num_negatives": 2},
        loops.Clusters,
        PCL,
        head(2, norm=False),
        # No cluster has more than two images: all have the same logarithm.
        without_effect=("alpha",),
        # Drawn by their numbers.
        known_clusters=True,
    ),
    "soft nearest neighbour": Case(
        "metric",
        {**SIZES, "loss": "soft_nearest_neighbor_loss_func"},
        loops.SoftNearestNeighbor,
        {"temperature": 1.0},
    ),
    "triplets": Case(
        "metric",
        {**SIZES, "loss": "triplet_loss_func", "loss_kwargs": {"margin": 0.5}},
        loops.Triplets,
        {"margin": 0.5},
    ),
    "arcface": Case(
        "metric",
        {
            **SIZES,
            "loss": "arcface_loss_func",
            "classes": "label",
            "loss_kwargs": {"scale": 8.0},
        },
        loops.ArcFace,
        {"scale": 8.0, "margin": 0.5},
    ),
    "alignment and uniformity": Case(
        "metric",
        {**SIZES, "loss": "alignment_loss_func", "uniformity_weight": 0.7},
        loops.Alignment,
        {"uniformity_weight": 0.7},
    ),
    "seed": Case(
        "seed",
        {**QUEUE, "teacher_temperature": 0.05, "small_weight": 0.7},
        loops.SEED,
        SEED,
        head(2, norm=False),
        views=1,
        without_effect=("small_weight",),
    ),
    "protoseed": Case(
        "protoseed",
        {"head": "mlp", "num_prototypes": 12},
        loops.ProtoSEED,
        SINKHORN,
        head(2, norm=False),
    ),
    "protoseed by softmax": Case(
        "protoseed",
        {"head": "mlp", "num_prototypes": 12, "assignment": "softmax"},
        loops.SoftmaxProtoSEED,
        PROTOTYPES,
        head(2, norm=False),
    ),
    "protocpc": Case(
        "protocpc",
        {**SIZES, "num_prototypes": 12},
        loops.ProtoCPC,
        {**SINKHORN, "freeze_prototypes_epochs": 1},
        head(3, norm=True),
    ),
}

CASES |= {
    f"{name}, small crops": replace(CASES[name], views=2, small=2, without_effect=())
    for name in (
        "debiased",
        "hard_negative",
        "mochi",
        "nnclr_symmetric",
        "soft nearest neighbour",
        "triplets",
        "arcface",
        "alignment and uniformity",
        "seed",
        "protoseed",
        "protocpc",
    )
}
CASES |= {
    "seed, large crops as targets": replace(
        CASES["seed, small crops"],
        kwargs={**CASES["seed"].kwargs, "small_crop_target": "large"},
        loop=loops.SEEDOfLarge,
    ),
    "protoseed, one large crop": replace(CASES["protoseed, small crops"], views=1),
}

PROCESSES: dict[str, Case] = {
    # From the last means, k-means does not find the best clusters without batch norm.
    name: replace(CASES[name], norm=False, known_clusters=True)
    for name in (
        "debiased, small crops",
        "hard_negative",
        "mochi",
        "nnclr_symmetric",
        "pcl",
        "triplets",
        "alignment and uniformity",
        "seed, small crops",
        "protoseed",
        "protocpc",
    )
}
"""Those of two processes: batch norm would see the images of its own process."""
