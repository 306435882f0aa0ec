"""Settings of ProtoCPC."""

from __future__ import annotations

from typing import ClassVar

from solo_ext.config.types import NonNegativeInt, PositiveInt, method_kwargs
from solo_ext.methods.prototype_kwargs import PrototypeKwargs


@method_kwargs
class ProtoCPCKwargs(PrototypeKwargs):
    """``method_kwargs`` of :class:`solo_ext.methods.ProtoCPC`.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: linear layers of the projector.
        proj_batch_norm: batch norm after its hidden layers.
        freeze_prototypes_epochs: first epochs in which the prototypes stay as they were drawn.
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
