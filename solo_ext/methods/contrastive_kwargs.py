"""Settings of the contrastive methods, and how they depend on each other."""

from __future__ import annotations

from typing import Any, Literal

from omegaconf import DictConfig

from solo_ext.core.errors import ConfigError
from solo_ext.core.precision import ComputeDtype
from solo_ext.core.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
    Section,
)
from solo_ext.methods.e_step import (
    CLUSTERS,
    PUBLISHED_CLUSTERS,
    EStepKwargs,
    check_e_step,
    check_prototypes,
)
from solo_ext.methods.negatives import MixingKwargs, fill_num_hard
from solo_ext.methods.projected import ProjectorKwargs
from solo_ext.methods.registry import capped_queue, fill_from_data, require_indices, scaled_clusters


class SupportSetKwargs(Section):
    """``method_kwargs.support_set``: where nearest neighbours are looked up.

    Attributes:
        size: number of past embeddings of the first view; null: 98,304, but at most an eighth of
            the training images. Without a queue ``queue_size`` sets it, as in solo-learn's nnclr.
        top_k: number of neighbours of each embedding; all are positives.
        exclude_own: whether to leave out the image's own earlier embedding, which is the nearest if
            the set holds much of the training set.
        exact: whether the search multiplies in fp32 and so finds the nearest rows; false multiplies
            in bfloat16, which is faster on a GPU.

    Example:
        >>> SupportSetKwargs(top_k=5)
        SupportSetKwargs(size=None, top_k=5, exclude_own=False, exact=True)
    """

    size: PositiveInt | None = None
    top_k: PositiveInt = 1
    exclude_own: bool = False
    exact: bool = True


class ContrastiveKwargs(ProjectorKwargs):
    """``method_kwargs`` of :class:`~solo_ext.methods.contrastive.Contrastive` and its projector.

    Attributes:
        proj_last_batch_norm: whether the projector's last layer has batch norm.
        pred_hidden_dim: width of the hidden layer of the queries' predictor; 0: no predictor.
        temperature: above 0.
        positives: ``view``: the image's other views; ``nearest_neighbor``: the support set's rows
            nearest to them; ``prototype``: the means of the image's clusters.
        negatives: ``batch``: the other images' views; ``queue``: past embeddings of a momentum
            encoder, one queue per large crop, without those of the images of nearest neighbours.
        queue_size: rows of each queue; null: 65,536, but at most an eighth of the training images.
        exclude_own: with a queue: whether to leave out the image's own earlier keys, which are
            among the most similar rows if the queue holds much of the training set.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; above 0 debiases.
        beta: 0 or more; above 0, more similar negatives have larger weights.
        anneal_beta: whether ``beta`` falls by an eighth every ``max_epochs // 9`` epochs, an option
            of hard negatives' official code; it is whole for twice as long at first. If 9 does not
            divide ``max_epochs``, it may reach 0 before the end.
        detach_weights: whether the weights of negatives are constants to the gradient.
        symmetric: with nearest neighbours and negatives of the batch: whether to contrast
            predictions with neighbours too, not only neighbours with predictions. With a queue:
            whether each large crop is query and key in turn; else the first is only a query, as in
            MoCo and MoCHi.
        batch_norm_splits: with a queue: number of parts of the batch that the backbone's batch norm
            normalises separately, as on so many GPUs; the momentum backbone's batch is shuffled, as
            in MoCo.
        mixing: as :class:`MixingKwargs`.
        support_set: as :class:`SupportSetKwargs`.
        clusters: for ``positives: prototype``, as :class:`solo_ext.methods.e_step.EStepKwargs`;
            during the warm-up epochs the positives are views.
        compute_dtype: dtype of products with a queue, if nothing is mixed. ``auto`` is bfloat16 on
            a GPU under autocast to it, else float32.

    Example:
        >>> kwargs = ContrastiveKwargs(negatives="queue", mixing={"num_pair_mixes": 64})
        >>> kwargs.temperature, kwargs.mixing.num_pair_mixes, kwargs.mixing.warmup_epochs
        (0.2, 64, 10)
    """

    proj_last_batch_norm: bool = False
    pred_hidden_dim: NonNegativeInt = 0
    temperature: PositiveFloat = 0.2
    positives: Literal["view", "nearest_neighbor", "prototype"] = "view"
    negatives: Literal["batch", "queue"] = "batch"
    queue_size: PositiveInt | None = None
    exclude_own: bool = False
    tau_plus: ProbabilityBelowOne = 0.0
    beta: NonNegativeFloat = 0.0
    anneal_beta: bool = False
    detach_weights: bool = False
    symmetric: bool = True
    batch_norm_splits: PositiveInt = 1
    mixing: MixingKwargs = MixingKwargs()
    support_set: SupportSetKwargs = SupportSetKwargs()
    clusters: EStepKwargs = EStepKwargs()
    compute_dtype: ComputeDtype = "auto"


def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
    """Sets sizes of queue, support set and clusters that are needed and null, from the data.

    Raises:
        ConfigError: more clusters than images.

    Example:
        >>> from solo_ext.methods.registry import example_config, fill_method_kwargs
        >>> cfg = example_config("hard_negative", negatives="queue")
        >>> cfg = fill_method_kwargs(cfg, ContrastiveKwargs)
        >>> fill_sizes(cfg, images=1400)
        >>> cfg.method_kwargs.queue_size, cfg.method_kwargs.support_set.size
        (172, None)
    """
    kwargs = cfg.method_kwargs
    near = kwargs.positives == "nearest_neighbor"
    if kwargs.negatives == "batch" and kwargs.queue_size is not None:
        _take_queue_size(kwargs, near)
    sizes = {
        "queue_size": (kwargs.negatives == "queue", capped_queue(65536)),
        "support_set.size": (near, capped_queue(98304)),
        "clusters.num_prototypes": (
            kwargs.positives == "prototype",
            scaled_clusters(*PUBLISHED_CLUSTERS),
        ),
    }
    fill_from_data(cfg, {key: size for key, (needed, size) in sizes.items() if needed}, images)
    if images is not None and kwargs.positives == "prototype":
        check_prototypes(kwargs.clusters, CLUSTERS, images)


def _take_queue_size(kwargs: Any, near: bool) -> None:
    """Without a queue, ``queue_size`` is the size of the support set, as in solo-learn's nnclr."""
    size, support = kwargs.queue_size, kwargs.support_set
    if not near or support.size not in (None, size):
        raise ConfigError(
            "method_kwargs.queue_size",
            size,
            f"negatives=batch has no queue, and support_set.size is {support.size}"
            if near
            else "negatives=batch has no queue",
            "remove it, or take method_kwargs.negatives=queue",
        )
    support.size, kwargs.queue_size = size, None


def validate(cfg: DictConfig) -> DictConfig:
    """Checks that the settings fit each other and the data.

    Raises:
        ConfigError: a setting does not fit; the message names the first one.

    Example:
        >>> from solo_ext.methods.registry import example_config, fill_method_kwargs
        >>> cfg = example_config("hard_negative", exclude_own=True)
        >>> validate(fill_method_kwargs(cfg, ContrastiveKwargs))
        Traceback (most recent call last):
            ...
        solo_ext.core.errors.ConfigError: ...exclude_own=true: negatives=batch has no queue; ...
    """
    kwargs = cfg.method_kwargs
    positives, in_batch = kwargs.positives, kwargs.negatives == "batch"
    mixed = kwargs.mixing.num_pair_mixes + kwargs.mixing.num_query_mixes > 0
    if kwargs.compute_dtype == "bfloat16" and (mixed or in_batch):
        raise ConfigError(
            "method_kwargs.compute_dtype",
            kwargs.compute_dtype,
            "it is for products with a queue that is not mixed",
            "take float32",
        )
    if (splits := kwargs.batch_norm_splits) > 1:
        batch = cfg.optimizer.batch_size
        if in_batch or cfg.get("sync_batchnorm") or batch % splits:
            raise ConfigError(
                "method_kwargs.batch_norm_splits",
                splits,
                f"negatives={kwargs.negatives}, batch_size={batch}, "
                f"sync_batchnorm={bool(cfg.get('sync_batchnorm'))}",
                "it is for negatives=queue, a batch that it divides, and no sync_batchnorm",
            )
    if kwargs.exclude_own:
        if in_batch:
            raise ConfigError(
                "method_kwargs.exclude_own",
                True,
                "negatives=batch has no queue",
                "remove it, or take method_kwargs.negatives=queue",
            )
        require_indices(cfg, "leaves the image's own earlier keys out")
    # Prototypes come after the warm-up; until then the positives are views.
    views = positives == "view" or (positives == "prototype" and kwargs.clusters.warmup_epochs)
    if kwargs.pred_hidden_dim and in_batch and views:
        raise ConfigError(
            "method_kwargs.pred_hidden_dim",
            kwargs.pred_hidden_dim,
            "views that are anchor, positive and negative at once have no side for a predictor",
            "take 0, negatives=queue, neighbours, or prototypes with clusters.warmup_epochs=0",
        )
    if positives == "nearest_neighbor" and kwargs.support_set.top_k > kwargs.support_set.size:
        raise ConfigError(
            "method_kwargs.support_set.top_k",
            kwargs.support_set.top_k,
            f"the support set has {kwargs.support_set.size} rows",
            f"allowed: up to {kwargs.support_set.size}",
        )
    fill_num_hard(cfg)
    if positives == "nearest_neighbor" and kwargs.support_set.exclude_own:
        require_indices(cfg, "leaves the image's own earlier embedding out")
    if positives == "nearest_neighbor" and not in_batch:
        require_indices(cfg, "leaves the neighbours' keys out of the queue's negatives")
    if positives == "prototype":
        require_indices(cfg, "looks clusters up")
        check_e_step(kwargs.clusters, CLUSTERS)
    return cfg
