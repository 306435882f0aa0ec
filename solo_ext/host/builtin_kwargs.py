"""``method_kwargs`` of solo-learn's built-in methods, with the defaults of its main branch.

main fills these in without looking at unknown keys; the release takes them as arguments of its
constructors. Both are checked against this table.
"""

from __future__ import annotations

from dataclasses import field

from solo_ext.config.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    method_kwargs,
)


@method_kwargs
class Projected:
    proj_hidden_dim: PositiveInt
    proj_output_dim: PositiveInt


@method_kwargs
class Contrastive(Projected):
    temperature: PositiveFloat


@method_kwargs
class Predicted(Projected):
    pred_hidden_dim: PositiveInt


@method_kwargs
class SimSiam(Predicted):
    # Upstream's own config sets it, its method never reads it.
    temperature: PositiveFloat = 0.2


@method_kwargs
class Queued(Contrastive):
    queue_size: PositiveInt = 65536


@method_kwargs
class NNCLR(Queued):
    pred_hidden_dim: PositiveInt


@method_kwargs
class NearestPredicted(Predicted):
    queue_size: PositiveInt = 65536


@method_kwargs
class ReSSL(Projected):
    temperature_q: PositiveFloat
    temperature_k: PositiveFloat
    queue_size: PositiveInt = 65536
    # Upstream's own configs set these, which are read from the section `momentum`.
    base_tau_momentum: Probability | None = None
    final_tau_momentum: Probability | None = None
    momentum_classifier: bool | None = None


@method_kwargs
class SwAV(Contrastive):
    queue_size: NonNegativeInt = 65536
    num_prototypes: PositiveInt = 3000
    sk_epsilon: PositiveFloat = 0.05
    sk_iters: PositiveInt = 3
    freeze_prototypes_epochs: NonNegativeInt = 1
    epoch_queue_starts: NonNegativeInt = 15


@method_kwargs
class DeepClusterV2(Projected):
    temperature: PositiveFloat = 0.1
    num_prototypes: list[PositiveInt] = field(default_factory=lambda: [3000, 3000, 3000])
    kmeans_iters: PositiveInt = 10


@method_kwargs
class DINO(Projected):
    num_prototypes: PositiveInt
    clip_grad: NonNegativeFloat = 0
    freeze_last_layer: NonNegativeInt = 1
    norm_last_layer: bool = True
    use_bn_in_head: bool = False
    student_temperature: PositiveFloat = 0.1
    teacher_temperature: PositiveFloat = 0.07
    warmup_teacher_temperature: PositiveFloat = 0.04
    warmup_teacher_temperature_epochs: NonNegativeInt = 0


@method_kwargs
class BarlowTwins(Projected):
    lamb: PositiveFloat = 0.0051
    scale_loss: PositiveFloat = 0.024


@method_kwargs
class VICReg(Projected):
    sim_loss_weight: NonNegativeFloat = 25.0
    var_loss_weight: NonNegativeFloat = 25.0
    cov_loss_weight: NonNegativeFloat = 1.0


@method_kwargs
class VIbCReg(Projected):
    sim_loss_weight: NonNegativeFloat = 25.0
    var_loss_weight: NonNegativeFloat = 25.0
    cov_loss_weight: NonNegativeFloat = 200.0
    iternorm: bool = False


@method_kwargs
class WMSE(Projected):
    whitening_iters: PositiveInt = 1
    whitening_size: PositiveInt = 256
    whitening_eps: NonNegativeFloat = 0.0


@method_kwargs
class MAE:
    decoder_embed_dim: PositiveInt
    decoder_depth: PositiveInt
    decoder_num_heads: PositiveInt
    mask_ratio: Probability = 0.75
    norm_pix_loss: bool = False


@method_kwargs
class MoCoV3(Contrastive):
    pred_hidden_dim: PositiveInt


BUILTIN_KWARGS: dict[str, type] = {
    "all4one": NNCLR,
    "barlow_twins": BarlowTwins,
    "byol": Predicted,
    "deepclusterv2": DeepClusterV2,
    "dino": DINO,
    "mae": MAE,
    "mocov2plus": Queued,
    "mocov3": MoCoV3,
    "nnbyol": NearestPredicted,
    "nnclr": NNCLR,
    "nnsiam": NearestPredicted,
    "ressl": ReSSL,
    "simclr": Contrastive,
    "simsiam": SimSiam,
    "supcon": Contrastive,
    "swav": SwAV,
    "vibcreg": VIbCReg,
    "vicreg": VICReg,
    "wmse": WMSE,
}

MOMENTUM_METHODS = frozenset({"byol", "dino", "mocov2plus", "mocov3", "nnbyol", "ressl", "all4one"})
"""Built-ins that read the section ``momentum`` of the config."""
