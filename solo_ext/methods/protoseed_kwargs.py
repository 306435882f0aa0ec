"""Settings of ProtoSEED."""

from __future__ import annotations

from typing import Literal

from solo_ext.config.types import method_kwargs
from solo_ext.methods.distillation_kwargs import DistillationKwargs
from solo_ext.methods.prototype_kwargs import PrototypeKwargs


@method_kwargs
class ProtoSEEDKwargs(PrototypeKwargs, DistillationKwargs):
    """``method_kwargs`` of :class:`solo_ext.methods.ProtoSEED`; defaults of the paper.

    Attributes:
        prototypes: that the teacher's embeddings are compared with: ``new``: those that the
            student learns; ``old``: those that came with the teacher, at which the student's own
            start.
        num_prototypes: K; null with old ones: as many as the teacher has, else as of
            :class:`PrototypeKwargs`.
    """

    prototypes: Literal["new", "old"] = "new"
