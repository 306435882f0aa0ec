"""ProtoCPC as a self-supervised method (Lee, 2021, openreview 8la28hZOwug)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section
from solo_ext.host import initialize_momentum_params
from solo_ext.losses.protocpc import ProtoCPCTerms, protocpc_step
from solo_ext.memory.heads import projector
from solo_ext.memory.prototypes import PrototypePrior, Prototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.projected import ProjectedMomentumMethod
from solo_ext.methods.registry import (
    METHODS,
    fill_from_data,
    fill_method_kwargs,
    idle_in_projector,
    logger,
    prototypes,
    require_two_views,
    typed_kwargs,
    warn_of_idle_settings,
)


class PrototypeKwargs(Section):
    """What ``method_kwargs`` of :class:`ProtoCPC` and :class:`ProtoSEED` share.

    Attributes:
        num_prototypes: K; null: 65,536, up to an eighth of the training images.
        student_temperature: above 0.
        teacher_temperature: above 0; of Sinkhorn-Knopp its regularisation.
        assignment: ``sinkhorn``: balanced over the batch; ``softmax``.
        sinkhorn_iterations: 1 or more.
        prior_momentum: in [0, 1], share of the old prior in the new one.
        prior_order: whether the loss takes the prior that already contains its batch
            (``before_loss``, as published) or the one before (``after_loss``).
        loss: ``protocpc``, or ``ce``: soft cross-entropy, which is ProtoCPC with a flat prior.
        compute_dtype: of products with prototypes; sums and exponentials stay in fp32.
    """

    SYNONYMS: ClassVar = {
        "temperature": "student_temperature",
        "sk_epsilon": "teacher_temperature",
        "sk_iters": "sinkhorn_iterations",
    }
    """solo-learn's names of these settings."""

    num_prototypes: PositiveInt | None = None
    student_temperature: PositiveFloat = 0.1
    teacher_temperature: PositiveFloat = 0.04
    assignment: Literal["sinkhorn", "softmax"] = "sinkhorn"
    sinkhorn_iterations: PositiveInt = 3
    prior_momentum: Probability = 0.9
    prior_order: Literal["before_loss", "after_loss"] = "before_loss"
    loss: Literal["protocpc", "ce"] = "protocpc"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


class ProtoCPCKwargs(PrototypeKwargs):
    """``method_kwargs`` of :class:`ProtoCPC`.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: linear layers of the projector.
        proj_batch_norm: batch norm after its hidden layers.
        freeze_prototypes_epochs: number of first epochs in which the prototypes do not learn.

    Example:
        >>> ProtoCPCKwargs().assignment
        'sinkhorn'
    """

    SYNONYMS: ClassVar = {
        **PrototypeKwargs.SYNONYMS,
        "freeze_last_layer": "freeze_prototypes_epochs",
        "use_bn_in_head": "proj_batch_norm",
    }

    proj_hidden_dim: PositiveInt = 2048
    proj_output_dim: PositiveInt = 256
    proj_layers: PositiveInt = 3
    proj_batch_norm: bool = True
    freeze_prototypes_epochs: NonNegativeInt = 1


@METHODS.register(
    "protocpc",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoCPC(ProjectedMomentumMethod):
    """Every crop predicts the momentum teacher's assignment of the other large crops (Lee, 2021).

    Teacher and student share the student's prototypes.

    Logs ``train_protocpc_loss``; ``train_align`` and ``train_unif``, its two terms;
    ``train_prior_perplexity``, the share of the prototypes that the prior spreads over; and once
    per epoch ``train_effective_rank``, ``train_alignment`` and ``train_uniformity`` of the last
    batch.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoCPCKwargs`.
    """

    kwargs_type = ProtoCPCKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, ProtoCPCKwargs)
        assert kwargs.num_prototypes is not None  # fill_sizes has replaced null by a number
        self.projector, self.momentum_projector = (self._new_projector() for _ in range(2))
        initialize_momentum_params(self.projector, self.momentum_projector)
        self.prototypes = Prototypes(kwargs.num_prototypes, kwargs.proj_output_dim)
        self.prior = PrototypePrior(kwargs.num_prototypes, kwargs.prior_momentum)
        self._next_prior: Tensor | None = None
        keep_out_of_broadcast(self)

    def _new_projector(self) -> nn.Module:
        kwargs = self.kwargs
        return projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
        )

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = ProjectedMomentumMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        cfg = fill_method_kwargs(cfg, ProtoCPCKwargs)
        ProtoCPC.fill_sizes(cfg)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the number of prototypes if it is null, by the training set.

        Args:
            cfg: the config, ``method_kwargs`` filled in.
            images: number of training images; counted by default where it is needed.
        """
        fill_from_data(cfg, {"num_prototypes": prototypes(65536)}, images)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the prototypes."""
        return [
            *super().learnable_params,
            {"name": "prototypes", "params": self.prototypes.parameters()},
        ]

    def on_train_start(self) -> None:
        """Reports settings that may surprise."""
        super().on_train_start()
        if self.trainer.is_global_zero:
            idle = idle_in_projector(self.kwargs)
            report_settings(self.cfg, ProtoCPCKwargs, idle)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """Algorithm 1 between crops of an image, plus the online classifier's loss."""
        out = super().training_step(batch, batch_idx)
        students = out["z"]  # of every crop
        teachers = out["momentum_z"]  # of the large crops
        loss, metrics = self.compare(students, teachers)
        self.keep_for_geometry(students)
        self.log_dict(
            {"train_protocpc_loss": loss, **metrics}, on_step=False, on_epoch=True, sync_dist=True
        )
        return loss + out["loss"]  # type: ignore[no-any-return]

    def compare(
        self, students: Sequence[Tensor], teachers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over pairs of a crop and another large crop.

        Args:
            students: (N, D) embeddings, one per crop.
            teachers: (N, D) momentum embeddings, one per large crop.

        Returns:
            Scalar, and what to log.
        """
        large = len(teachers)
        # No view predicts its own assignment: (V, U) weights, 0 on the diagonal.
        others = torch.ones(len(students), large, device=students[0].device)
        others[:large] -= torch.eye(large, device=others.device)
        terms = protocpc_step(
            torch.stack(list(students)),  # z_s
            torch.stack(list(teachers)),  # z_t
            self.prototypes.weight,  # W
            self.prior.value,  # q
            targets=others,
            **step_settings(self.kwargs),
        )
        self._next_prior = terms.prior
        return terms.loss, step_metrics(terms)

    def on_after_backward(self) -> None:
        """Drops the prototypes' gradient in the first epochs, so that they stay as drawn."""
        super().on_after_backward()
        if self.current_epoch < self.kwargs.freeze_prototypes_epochs:
            self.prototypes.weight.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates the momentum networks, prototypes and prior."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.prototypes.normalize_()
        if self._next_prior is not None:
            self.prior.commit_(self._next_prior)
            self._next_prior = None


def step_settings(kwargs: PrototypeKwargs) -> dict[str, Any]:
    """The arguments of :func:`~solo_ext.losses.protocpc_step` that :class:`PrototypeKwargs` give.

    Example:
        >>> step_settings(PrototypeKwargs())["prior_momentum"]
        0.9
    """
    return {
        "student_temperature": kwargs.student_temperature,
        "teacher_temperature": kwargs.teacher_temperature,
        "assignment": kwargs.assignment,
        "iterations": kwargs.sinkhorn_iterations,
        "prior_momentum": kwargs.prior_momentum,
        "prior_order": kwargs.prior_order,
        "loss": kwargs.loss,
        "compute_dtype": torch.bfloat16 if kwargs.compute_dtype == "bfloat16" else None,
    }


def step_metrics(terms: ProtoCPCTerms) -> dict[str, Tensor]:
    """What to log of a step: both terms of the loss, and how far the prior spreads.

    Example:
        >>> zero = torch.zeros(())
        >>> flat = ProtoCPCTerms(zero, zero, zero, prior=torch.ones(20))
        >>> round(step_metrics(flat)["train_prior_perplexity"].item(), 3)
        1.0
    """
    share = terms.prior / len(terms.prior)
    perplexity = torch.special.entr(share).sum().exp() / len(share)
    return {
        "train_align": terms.align,
        "train_unif": terms.unif,
        "train_prior_perplexity": perplexity,
    }


def report_settings(
    cfg: DictConfig, kwargs_type: type[PrototypeKwargs], idle: dict[str, str]
) -> None:
    """Warns of settings that do nothing.

    Args:
        cfg: the config.
        kwargs_type: the class of its ``method_kwargs``.
        idle: the method's own settings that nothing reads, with the reason.
    """
    kwargs = cfg.method_kwargs
    idle = dict(idle)
    if kwargs.assignment == "softmax":
        idle["sinkhorn_iterations"] = "assignment=softmax does not iterate"
    if kwargs.loss == "ce":
        idle |= dict.fromkeys(("prior_momentum", "prior_order"), "loss=ce has no prior")
    warn_of_idle_settings(cfg, kwargs_type, idle)
    if kwargs.prior_momentum == 1 and kwargs.loss == "protocpc":
        logger.warning(
            "method_kwargs.prior_momentum=1: the prior stays flat and the loss is cross-entropy"
        )
