"""ProtoCPC as a self-supervised method (Lee, 2021, openreview 8la28hZOwug).

One step (Algorithm 1), W the prototypes, q their prior; in products z and W are of unit length::

    z_s = g_s(f_s(x)) of every crop, z_t = g_t(f_t(x)) of the large ones      training_step
    p_t = Sinkhorn or softmax of z_t . W / tau_t                              protocpc_step
    q <- m q + (1 - m) K mean(p_t)                                            Eq. 4
    loss = -p_t . (z_s . W / tau_s) + log sum_k q_k exp(z_s . W_k / tau_s)    align + unif
    f_t, g_t <- moving averages of f_s, g_s; W <- unit rows                   on_train_batch_end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core.precision import ComputeDtype, factors_dtype
from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section
from solo_ext.host import initialize_momentum_params
from solo_ext.losses.protocpc import protocpc_step
from solo_ext.memory.prototypes import PrototypePrior, Prototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.projected import ProjectedMethod, ProjectedMomentumMethod, ProjectorKwargs
from solo_ext.methods.registry import (
    METHODS,
    capped_prototypes,
    fill_from_data,
    fill_method_kwargs,
    require_two_views,
    typed_kwargs,
)


class PrototypeKwargs(Section):
    """Settings that :class:`ProtoCPC` and :class:`ProtoSEED` share.

    Attributes:
        num_prototypes: K; null: 65,536, but at most an eighth of the training images.
        student_temperature: above 0.
        teacher_temperature: above 0; Sinkhorn-Knopp's regularisation epsilon.
        assignment: ``sinkhorn``: balanced over the batch; ``softmax``.
        sinkhorn_iterations: 1 or more.
        prior_momentum: m in [0, 1], share of the old prior in the new one.
        prior_order: when the batch updates the prior: ``before_loss``, as published, or
            ``after_loss``, so that the loss takes the old prior.
        loss: ``protocpc``, or ``ce``: soft cross-entropy, which is ProtoCPC with a flat prior.
        compute_dtype: dtype of products with prototypes; sums and exponentials stay in fp32.
            ``auto`` is bfloat16 on a GPU under autocast to it, else float32.

    Example:
        >>> PrototypeKwargs(num_prototypes=3000, assignment="softmax").prior_momentum
        0.9
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
    compute_dtype: ComputeDtype = "auto"


class ProtoCPCKwargs(PrototypeKwargs, ProjectorKwargs):
    """``method_kwargs`` of :class:`ProtoCPC`, beside the projector's.

    Attributes:
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

    proj_output_dim: PositiveInt = 256
    proj_layers: PositiveInt = 3
    freeze_prototypes_epochs: NonNegativeInt = 1


class PrototypeMethod(ProjectedMethod):
    """Base class of ProtoCPC and ProtoSEED, which create the prototypes W and the prior q.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> method = ProtoCPC(example_config("protocpc", num_prototypes=20, proj_output_dim=16))
        >>> students, teachers = torch.randn(2, 2, 4, 16)
        >>> loss, _ = method.protocpc(students, teachers, targets=1 - torch.eye(2))
        >>> loss.shape, method.prior.value.shape
        (torch.Size([]), torch.Size([20]))
    """

    kwargs: Any
    prototypes: Prototypes
    prior: PrototypePrior

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the prototypes."""
        prototypes = {"name": "prototypes", "params": self.prototypes.parameters()}
        return [*super().learnable_params, prototypes]

    def protocpc(
        self,
        students: Sequence[Tensor],
        teachers: Sequence[Tensor],
        targets: Tensor,
        teacher_prototypes: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of Algorithm 1; the updated prior is stored after the step.

        Args:
            students: z_s, (N, D) each, of V crops.
            teachers: z_t, (N, D) each, of U crops.
            targets: (V, U) weights of each teacher crop as a target of each student crop.
            teacher_prototypes: W of the teacher; ``None``: the student's.

        Returns:
            Scalar, and what to log.
        """
        kwargs = self.kwargs
        terms = protocpc_step(
            torch.stack(list(students)),
            torch.stack(list(teachers)),
            self.prototypes.weight,
            self.prior.value,
            teacher_prototypes=teacher_prototypes,
            targets=targets,
            student_temperature=kwargs.student_temperature,
            teacher_temperature=kwargs.teacher_temperature,
            assignment=kwargs.assignment,
            iterations=kwargs.sinkhorn_iterations,
            prior_momentum=kwargs.prior_momentum,
            prior_order=kwargs.prior_order,
            loss=kwargs.loss,
            compute_dtype=factors_dtype(kwargs.compute_dtype, students[0].device),
        )
        self._next_prior = terms.prior
        # exp(entropy) / K: the share of prototypes in use, 1 for a flat prior.
        share = terms.prior / len(terms.prior)
        perplexity = torch.special.entr(share).sum().exp() / len(share)
        return terms.loss, {
            "train_align": terms.align,
            "train_unif": terms.unif,
            "train_prior_perplexity": perplexity,
        }

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates any momentum networks, normalises the prototypes and stores the new prior."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.prototypes.normalize_()
        self.prior.commit_(self._next_prior)


@METHODS.register(
    "protocpc",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoCPC(PrototypeMethod, ProjectedMomentumMethod):
    """Every crop predicts the momentum teacher's assignment of the other large crops (Lee, 2021).

    Teacher and student share the student's prototypes. Logs ``train_protocpc_loss``, what
    docs/reference/logged.md lists of the ProtoCPC loss, and the geometry of
    :class:`ProjectedMethod`.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoCPCKwargs`.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> method = ProtoCPC(example_config("protocpc", num_prototypes=20))
        >>> views = [torch.randn(4, 3, 32, 32) for _ in range(2)]
        >>> z_s = [method(x)["z"] for x in views]
        >>> z_t = [method.momentum_forward(x)["z"] for x in views]
        >>> loss, metrics = method.compare(z_s, z_t)
        >>> z_s[0].shape, loss.shape, sorted(metrics)[0]
        (torch.Size([4, 256]), torch.Size([]), 'train_align')
    """

    kwargs_type = ProtoCPCKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, ProtoCPCKwargs)
        assert kwargs.num_prototypes is not None  # fill_sizes has replaced null by a number
        self.projector, self.momentum_projector = (self._new_projector(kwargs) for _ in range(2))
        initialize_momentum_params(self.projector, self.momentum_projector)
        self.prototypes = Prototypes(kwargs.num_prototypes, kwargs.proj_output_dim)
        self.prior = PrototypePrior(kwargs.num_prototypes, kwargs.prior_momentum)
        keep_out_of_broadcast(self)

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
        """Sets the number of prototypes from the training set if it is null."""
        fill_from_data(cfg, {"num_prototypes": capped_prototypes(65536)}, images)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """Algorithm 1 between crops of an image, plus the online classifier's loss."""
        out = super().training_step(batch, batch_idx)
        # z_s = g_s(f_s(x)) of every crop, z_t = g_t(f_t(x)) of the large ones.
        loss, metrics = self.compare(out["z"], out["momentum_z"])
        self.log_step(loss, metrics, out["z"])
        return loss + out["loss"]  # type: ignore[no-any-return]

    def compare(
        self, students: Sequence[Tensor], teachers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over pairs of a crop and another large crop.

        Args:
            students: z_s, (N, D) each, one per crop.
            teachers: z_t, (N, D) each, one per large crop.

        Returns:
            Scalar, and what to log.
        """
        # No crop predicts its own assignment: the weights (V, U) are 0 on the diagonal.
        others = torch.ones(len(students), len(teachers), device=students[0].device)
        others[: len(teachers)].fill_diagonal_(0)
        return self.protocpc(students, teachers, others)

    def on_after_backward(self) -> None:
        """Drops the prototypes' gradient in the first epochs, so that they stay as drawn."""
        super().on_after_backward()
        if self.current_epoch < self.kwargs.freeze_prototypes_epochs:
            self.prototypes.weight.grad = None
