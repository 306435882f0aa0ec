"""The methods of the matrix, and the settings of their short runs."""

from __future__ import annotations

from typing import Any

from solo_ext import host
from tests.conftest import KWARGS

PLUGIN = (
    "debiased",
    "hard_negative",
    "mochi",
    "metric",
    "pcl",
    "nnclr_symmetric",
    "seed",
    "protoseed",
    "protocpc",
)
BUILTIN = tuple(sorted({*KWARGS, "mae"} - {*PLUGIN}))
"""Of solo-learn's main branch; the release has fewer."""
CHECKS = (
    "resume at epoch",
    "resume mid-epoch",
    "kill -9",
    "2 processes",
    "4 processes",
    "AMP",
    "accumulation",
    "multi-crop",
    "DALI",
)
VIT: dict[str, Any] = {
    "name": "timm/vit_tiny_patch16_224",
    "kwargs": {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "dynamic_img_size": True,
    },
}
"""Without batch norm."""
MAE: dict[str, Any] = {
    "backbone": {
        "name": "vit_small",
        "kwargs": {"img_size": 16, "patch_size": 8},
    },
    "method_kwargs": {
        "mask_ratio": 0.5,
        "decoder_embed_dim": 16,
        "decoder_depth": 1,
        "decoder_num_heads": 2,
    },
    "augmentations": [{"crop_size": 16, "num_crops": 1}],
}
_LOCAL = {
    "barlow_twins": "its loss normalises over one process's batch, and no gradient goes through "
    "what it sums over the processes",
    "deepclusterv2": "its k-means starts from the first process's rows",
    "wmse": "it whitens within one process's batch",
}
_COMPARES = "its loss compares the images of one process's batch"
LOCAL = {
    "main": {
        **_LOCAL,
        "all4one": "its loss of features normalises over one process's batch; each process draws "
        "its own dropout",
        "mae": "each process masks patches by draws of its own",
    },
    "1.0.2": {
        **_LOCAL,
        "nnclr": _COMPARES,
        "simclr": _COMPARES,
        "vicreg": "its variance and covariance are those of one process's batch",
    },
}
"""Why processes of a host's method differ from one on the joined batch, all of them alike."""
IN_TURN = {"main": ("wmse",), "1.0.2": ("simclr", "vicreg", "wmse")}
"""Of these, whose loss is of one batch alone: one process can take the batches in turn."""
TWO_CROPS = {
    "main": {"pcl", "all4one", "mae"},
    "1.0.2": {"pcl", *BUILTIN} - {"byol", "simclr", "wmse"},
}
"""Methods of a host that take no small crops, MAE for its backbone of one size."""
OWN: dict[str, tuple[str, ...]] = {"deepclusterv2": ("local_memory",), "swav": ("queue",)}
"""Tables of which each process of a built-in has its part, of the images that it saw."""


def methods() -> list[str]:
    """The plugin's, then those of the installed host."""
    return [*PLUGIN, *(name for name in BUILTIN if name in host.load().methods)]
