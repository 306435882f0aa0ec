"""ProtoSEED: distillation of assignments to prototypes (Lee, 2021, openreview 8la28hZOwug).

The step of ProtoCPC (Algorithm 1) with a frozen teacher f_t; W are the student's prototypes, W_t
the same ones or those of the teacher's training, q the prior of the assignments; in products z and
W are of unit length::

    z_s = g_s(f_s(x)) of every crop                                           training_step
    z_t = f_t(x) of the large crops, without gradient                         Distillation.targets
    p_t = Sinkhorn or softmax of z_t . W_t / tau_t                            protocpc_step
    q <- m q + (1 - m) K mean(p_t)                                            Eq. 4
    loss = -p_t . (z_s . W / tau_s) + log sum_k q_k exp(z_s . W_k / tau_s)    align + unif
    W <- unit rows                                                            on_train_batch_end

From ``protocpc_step`` on these are lines of :mod:`solo_ext.methods.protocpc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.memory.prototypes import PrototypePrior, Prototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.distillation import Distillation, DistillationKwargs
from solo_ext.methods.protocpc import ProtoCPC, PrototypeKwargs, PrototypeMethod
from solo_ext.methods.registry import METHODS


class ProtoSEEDKwargs(PrototypeKwargs, DistillationKwargs):
    """``method_kwargs`` of :class:`ProtoSEED`; defaults of the paper.

    Attributes:
        prototypes: which prototypes the teacher's embeddings are assigned to: ``new``: those that
            the student learns; ``old``: those of the teacher's own training, with which the
            student's are initialised.
        num_prototypes: K; null: with ``old`` as many as the teacher has, with ``new`` as in
            :class:`PrototypeKwargs`.

    Example:
        >>> ProtoSEEDKwargs().prototypes, ProtoSEEDKwargs().head
        ('new', 'teacher')
    """

    prototypes: Literal["new", "old"] = "new"


@METHODS.register(
    "protoseed",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoSEED(PrototypeMethod, Distillation):
    """Distils a frozen teacher's assignments to prototypes by the ProtoCPC loss (Lee, 2021).

    With one large crop, the teacher's assignment of that crop is the target of every crop; with
    two, each has its own assignment as the target, and small crops have both.

    Logs what :class:`Distillation` does, and what docs/reference/logged.md lists of the ProtoCPC
    loss.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoSEEDKwargs`.

    Raises:
        ConfigError: ``prototypes: old``, but the teacher has none, or another number of them.

    Example:
        >>> import tempfile, timm
        >>> from solo_ext.methods.registry import example_config
        >>> network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)
        >>> file = tempfile.NamedTemporaryFile()
        >>> torch.save(network.state_dict(), file.name)
        >>> teacher = {"layout": "timm", "path": file.name, "model": "resnet10t"}
        >>> teacher["model_kwargs"] = {"channels": [8, 8, 8, 8]}
        >>> kwargs = {"teacher": teacher, "head": "mlp", "num_prototypes": 20}
        >>> method = ProtoSEED(example_config("protoseed", large=1, **kwargs))
        >>> crop = torch.randn(4, 3, 32, 32)
        >>> z_s, z_t = method(crop)["z"], method.targets(crop)[0]
        >>> z_s.shape, method.distill([z_s], [z_t])[0].shape
        (torch.Size([4, 8]), torch.Size([]))
    """

    kwargs_type = ProtoSEEDKwargs
    kwargs: ProtoSEEDKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        count, old = self.kwargs.num_prototypes, self.teacher.prototypes
        if old is None:
            assert count is not None  # fill_sizes has replaced null by a number
            self.prototypes = Prototypes(count, self.embed_dim)
        elif count in (None, len(old)):
            self.prototypes = Prototypes.from_rows(old)
        else:
            raise ConfigError(
                "method_kwargs.num_prototypes",
                count,
                f"the teacher has {len(old)}: {self.description}",
                f"take {len(old)}, or prototypes=new",
            )
        self.prior = PrototypePrior(len(self.prototypes.weight), self.kwargs.prior_momentum)
        keep_out_of_broadcast(self)

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        cls.fill_sizes(cfg)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the number of new prototypes from the training set if it is null."""
        if cfg.method_kwargs.prototypes == "new":
            ProtoCPC.fill_sizes(cfg, images)

    @property
    def keep_prototypes(self) -> bool:
        """Whether the teacher's own prototypes are asked for."""
        return bool(self.kwargs.prototypes == "old")

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """Algorithm 1 between student and teacher, plus the online classifier's loss."""
        _, crops, _ = batch
        out = super().training_step(batch, batch_idx)
        z_s, z_t = out["z"], self.targets(crops)  # student: every crop; frozen teacher: large ones
        loss, metrics = self.distill(z_s, z_t)
        self.log_step(loss, metrics, z_s)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def distill(
        self, students: Sequence[Tensor], teachers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every crop with the large crops' assignments.

        Args:
            students: z_s, (N, D) each, one per crop.
            teachers: z_t, (N, D) each, one per large crop.

        Returns:
            Scalar, and what to log.
        """
        # One large crop is the target of every crop, itself included. Each of two large crops is
        # its own target, and small crops have both as targets: weights (V, U).
        large = len(teachers)
        targets = torch.full((len(students), large), 1 / large, device=students[0].device)
        targets[:large] = torch.eye(large, device=targets.device)
        return self.protocpc(students, teachers, targets, self.teacher.prototypes)
