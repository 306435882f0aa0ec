"""Settings that the contrastive methods share."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from solo_ext.config.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
    method_kwargs,
)
from solo_ext.core.errors import ConfigError
from solo_ext.methods.data_sizes import clusters, fill_from_data, queue
from solo_ext.methods.e_step import (
    PUBLISHED_CLUSTERS,
    EStepKwargs,
    check_e_step,
    check_prototypes,
)
from solo_ext.methods.registry import logger, require_indices

CLUSTERS = "method_kwargs.clusters"
"""Where the settings of the E-step stand in the config."""


@method_kwargs
class MixingKwargs:
    """``method_kwargs.mixing``: MoCHi's synthetic negatives; none by default.

    Attributes:
        num_hard: negatives most similar to the query, which are mixed; null: 1,024, up to a
            sixteenth of the queue.
        num_pair_mixes: mixtures of two of them.
        num_query_mixes: mixtures of one with the query.
        warmup_epochs: epochs without mixtures.
    """

    num_hard: PositiveInt | None = None
    num_pair_mixes: NonNegativeInt = 0
    num_query_mixes: NonNegativeInt = 0
    warmup_epochs: NonNegativeInt = 10


@method_kwargs
class SupportSetKwargs:
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


@method_kwargs
class ContrastiveKwargs:
    """``method_kwargs`` of :class:`solo_ext.methods.contrastive.Contrastive`.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: linear layers of the projector.
        proj_batch_norm: batch norm after its hidden layers.
        proj_last_batch_norm: and after its last.
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
    """Gives tables that are needed and have no size one that suits the training set.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        images: training images; by default they are counted if need be.

    Raises:
        ConfigError: a queue size where nothing is queued, or two sizes of the support set.
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
    """Takes it for the support set's, which is what solo-learn's ``nnclr`` means by it."""
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


def fill_num_hard(cfg: DictConfig) -> None:
    """Gives mixtures that say nothing of it a number of negatives to mix.

    As many as in the paper for ImageNet, up to a sixteenth of the queue, as there for ImageNet-100.

    Args:
        cfg: the config; the queue has a size if there is one.
    """
    kwargs, mixing = cfg.method_kwargs, cfg.method_kwargs.mixing
    if mixing.num_hard is not None or not mixing.num_pair_mixes + mixing.num_query_mixes:
        return
    mixing.num_hard = 1024
    rows = kwargs.queue_size if kwargs.negatives == "queue" else None
    if rows is not None and rows // 16 < mixing.num_hard:
        mixing.num_hard = max(1, rows // 16)
        line = f"{cfg.method}: mixing.num_hard={mixing.num_hard} from queue_size={rows}"
        rank_zero_only(logger.info)(line)


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other and of the data.

    Raises:
        ConfigError: naming the first that does not fit.
    """
    kwargs = cfg.method_kwargs
    mixes = kwargs.mixing.num_pair_mixes + kwargs.mixing.num_query_mixes
    if mixes and kwargs.negatives == "queue" and kwargs.mixing.num_hard > kwargs.queue_size:
        raise ConfigError(
            "method_kwargs.mixing.num_hard",
            kwargs.mixing.num_hard,
            f"the queue has {kwargs.queue_size} rows",
            f"allowed: up to {kwargs.queue_size}",
        )
    if kwargs.compute_dtype != "float32" and (mixes or kwargs.negatives != "queue"):
        raise ConfigError(
            "method_kwargs.compute_dtype",
            kwargs.compute_dtype,
            "it is for products with a queue that is not mixed",
            "take float32",
        )
    if kwargs.pred_hidden_dim and (kwargs.positives, kwargs.negatives) == ("view", "batch"):
        raise ConfigError(
            "method_kwargs.pred_hidden_dim",
            kwargs.pred_hidden_dim,
            "views that are anchor, positive and negative at once have no side for a predictor",
            "take 0, or other positives or negatives",
        )
    warming = kwargs.positives == "prototype" and kwargs.clusters.warmup_epochs > 0
    if kwargs.pred_hidden_dim and kwargs.negatives == "batch" and warming:
        raise ConfigError(
            f"{CLUSTERS}.warmup_epochs",
            kwargs.clusters.warmup_epochs,
            "until then positives are views of the batch, which have no side for the predictor",
            "take 0, or method_kwargs.pred_hidden_dim=0",
        )
    if kwargs.positives == "nearest_neighbor":
        _settle_support_set(cfg, kwargs.support_set)
    if kwargs.positives == "prototype":
        require_indices(cfg, "looks clusters up")
        check_e_step(kwargs.clusters, CLUSTERS)
    return cfg


def _settle_support_set(cfg: DictConfig, settings: Any) -> None:
    if settings.top_k > settings.size:
        raise ConfigError(
            "method_kwargs.support_set.top_k",
            settings.top_k,
            f"the support set has {settings.size} rows",
            f"allowed: up to {settings.size}",
        )
    if settings.exclude_own:
        require_indices(cfg, "leaves the image's own earlier embedding out")


def check_size(cfg: DictConfig, num_samples: int) -> None:
    """Refuses more prototypes than samples.

    Raises:
        ConfigError: with both numbers.
    """
    if cfg.method_kwargs.positives == "prototype":
        check_prototypes(cfg.method_kwargs.clusters, CLUSTERS, num_samples)
