"""Settings of the contrastive methods, how they depend on each other, and which are idle."""

from __future__ import annotations

from typing import Any, Literal

from omegaconf import DictConfig

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
    Section,
)
from solo_ext.methods.e_step import (
    PUBLISHED_CLUSTERS,
    EStepKwargs,
    check_e_step,
    check_prototypes,
    warn_of_late_start,
)
from solo_ext.methods.negatives import (
    MixingKwargs,
    check_num_hard,
    fill_num_hard,
    idle_in_negatives,
    mixes,
    report_mixing,
)
from solo_ext.methods.registry import (
    UNREAD_ALPHA,
    clusters,
    fill_from_data,
    has_indices,
    idle_in_projector,
    logger,
    queue,
    require_indices,
    warn_of_idle_settings,
    warn_of_the_floor,
)

CLUSTERS = "method_kwargs.clusters"
"""Config key of the E-step's settings."""


class SupportSetKwargs(Section):
    """``method_kwargs.support_set``: where nearest neighbours are looked up.

    Attributes:
        size: number of past embeddings, of the first view; null: 98,304, up to an eighth of the
            training images. ``queue_size`` where there is no queue, as in solo-learn's ``nnclr``.
        top_k: neighbours of each embedding, all of them positives.
        exclude_own: leave out the image's own earlier embedding, which is the nearest where the
            set holds much of the training set.
    """

    size: PositiveInt | None = None
    top_k: PositiveInt = 1
    exclude_own: bool = False


class ContrastiveKwargs(Section):
    """``method_kwargs`` of :class:`solo_ext.methods.contrastive.Contrastive`.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: linear layers of the projector.
        proj_batch_norm: batch norm after its hidden layers.
        proj_last_batch_norm: batch norm after its last layer.
        pred_hidden_dim: width of the hidden layer of a predictor on the side of the queries; 0 is
            none.
        temperature: above 0.
        positives: ``view``: the image's other views; ``nearest_neighbor``: the support set's rows
            nearest to them; ``prototype``: the means of the image's clusters.
        negatives: ``batch``: the other images' views; ``queue``: past embeddings of a momentum
            encoder, one queue per large crop.
        queue_size: of each; null: 65,536, up to an eighth of the training images.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; above 0 debiases.
        beta: 0 or more; above 0 negatives weigh the more the more similar they are.
        detach_weights: no gradient through those weights.
        symmetric: nearest neighbours against negatives of the batch: contrast predictions with
            neighbours too, not only neighbours with predictions.
        mixing: as :class:`MixingKwargs`.
        support_set: as :class:`SupportSetKwargs`.
        clusters: of ``prototype``, as :class:`solo_ext.methods.e_step.EStepKwargs`; during
            its warm-up epochs the positives are views.
        compute_dtype: of products with a queue that is not mixed.
    """

    proj_hidden_dim: PositiveInt = 2048
    proj_output_dim: PositiveInt = 128
    proj_layers: PositiveInt = 2
    proj_batch_norm: bool = True
    proj_last_batch_norm: bool = False
    pred_hidden_dim: NonNegativeInt = 0
    temperature: PositiveFloat = 0.2
    positives: Literal["view", "nearest_neighbor", "prototype"] = "view"
    negatives: Literal["batch", "queue"] = "batch"
    queue_size: PositiveInt | None = None
    tau_plus: ProbabilityBelowOne = 0.0
    beta: NonNegativeFloat = 0.0
    detach_weights: bool = False
    symmetric: bool = True
    mixing: MixingKwargs = MixingKwargs()
    support_set: SupportSetKwargs = SupportSetKwargs()
    clusters: EStepKwargs = EStepKwargs()
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
    """Sets the sizes of queue and support set that are needed and null, by the training set.

    Args:
        cfg: the config, its ``method_kwargs`` filled in.
        images: number of training images; counted by default where a size depends on it.

    Raises:
        ConfigError: ``queue_size`` without a queue, or two different sizes of the support set.
    """
    kwargs = cfg.method_kwargs
    _take_queue_size(kwargs)
    sizes = {
        "queue_size": (kwargs.negatives == "queue", queue(65536)),
        "support_set.size": (kwargs.positives == "nearest_neighbor", queue(98304)),
        "clusters.num_prototypes": (kwargs.positives == "prototype", clusters(*PUBLISHED_CLUSTERS)),
    }
    fill_from_data(cfg, {key: size for key, (needed, size) in sizes.items() if needed}, images)
    fill_num_hard(cfg)


def _take_queue_size(kwargs: Any) -> None:
    """Without a queue, takes ``queue_size`` for the support set's, as solo-learn's ``nnclr``."""
    size, support = kwargs.queue_size, kwargs.support_set
    if size is None or kwargs.negatives == "queue":
        return
    if kwargs.positives != "nearest_neighbor":
        raise ConfigError(
            "method_kwargs.queue_size",
            size,
            "negatives=batch has no queue",
            "remove it, or take method_kwargs.negatives=queue",
        )
    if support.size not in (None, size):
        raise ConfigError(
            "method_kwargs.queue_size",
            size,
            f"without a queue it is method_kwargs.support_set.size, which is {support.size}",
            "give one of them",
        )
    support.size, kwargs.queue_size = size, None


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other and of the data.

    Raises:
        ConfigError: naming the first that does not fit.
    """
    kwargs = cfg.method_kwargs
    positives, negatives = kwargs.positives, kwargs.negatives
    support, e_step = kwargs.support_set, kwargs.clusters
    check_num_hard(kwargs)
    if kwargs.compute_dtype != "float32" and (mixes(kwargs) or negatives != "queue"):
        raise ConfigError(
            "method_kwargs.compute_dtype",
            kwargs.compute_dtype,
            "it is for products with a queue that is not mixed",
            "take float32",
        )
    if kwargs.pred_hidden_dim and (positives, negatives) == ("view", "batch"):
        raise ConfigError(
            "method_kwargs.pred_hidden_dim",
            kwargs.pred_hidden_dim,
            "views that are anchor, positive and negative at once have no side for a predictor",
            "take 0, or other positives or negatives",
        )
    warming = (positives, negatives) == ("prototype", "batch") and e_step.warmup_epochs
    if kwargs.pred_hidden_dim and warming:
        raise ConfigError(
            f"{CLUSTERS}.warmup_epochs",
            e_step.warmup_epochs,
            "until then positives are views of the batch, which have no side for the predictor",
            "take 0, or method_kwargs.pred_hidden_dim=0",
        )
    if positives == "nearest_neighbor" and support.top_k > support.size:
        raise ConfigError(
            "method_kwargs.support_set.top_k",
            support.top_k,
            f"the support set has {support.size} rows",
            f"allowed: up to {support.size}",
        )
    if positives == "nearest_neighbor" and support.exclude_own:
        require_indices(cfg, "leaves the image's own earlier embedding out")
    if positives == "prototype":
        require_indices(cfg, "looks clusters up")
        check_e_step(e_step, CLUSTERS)
    return cfg


def check_size(cfg: DictConfig, num_samples: int) -> None:
    """Refuses more prototypes than samples.

    Raises:
        ConfigError: with both numbers.
    """
    if cfg.method_kwargs.positives == "prototype":
        check_prototypes(cfg.method_kwargs.clusters, CLUSTERS, num_samples)


def report_settings(
    cfg: DictConfig, kwargs_type: type[ContrastiveKwargs], num_samples: int | None
) -> None:
    """Reports settings at the start of training that do nothing or may surprise.

    Args:
        cfg: the config.
        kwargs_type: the class of its ``method_kwargs``.
        num_samples: of the training set, needed where a support set is compared with it.
    """
    kwargs, support = cfg.method_kwargs, cfg.method_kwargs.support_set
    positives, negatives = kwargs.positives, kwargs.negatives
    idle = idle_in_projector(kwargs)
    if positives == "prototype":
        idle["clusters.alpha"] = UNREAD_ALPHA
        warn_of_late_start(cfg, kwargs.clusters, CLUSTERS)
    else:
        idle["clusters"] = f"positives={positives} has no clusters"
    if positives != "nearest_neighbor":
        idle["support_set"] = f"positives={positives} has no support set"
    if (positives, negatives) != ("nearest_neighbor", "batch"):
        idle["symmetric"] = "read with positives=nearest_neighbor and negatives=batch"
    warn_of_idle_settings(cfg, kwargs_type, idle | idle_in_negatives(kwargs))
    warn_of_the_floor(
        "method_kwargs",
        kwargs.tau_plus,
        kwargs.beta,
        kwargs.temperature,
        kwargs.proj_output_dim,
        watch="train_clamped_fraction",
    )
    # Neighbours are compared with the predictions of one crop at a time.
    report_mixing(cfg, all_crops=positives != "nearest_neighbor")
    if positives != "nearest_neighbor" or not num_samples or support.exclude_own:
        return
    share = min(support.size / num_samples, 1)
    if share > 0.5:
        exclude = "exclude_own: true or a smaller size (watch train_nn_own)"
        logger.warning(
            f"method_kwargs.support_set.size={support.size} holds {share:.0%} of the {num_samples} "
            "training images: an image's nearest neighbour will mostly be its own earlier "
            f"embedding; take {exclude if has_indices(cfg) else 'a smaller size'}"
        )
