"""The methods of the matrix, and the settings of their short runs."""

from __future__ import annotations

from typing import Any

from solo_ext import host

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
BUILTIN = (
    "all4one",
    "barlow_twins",
    "byol",
    "deepclusterv2",
    "dino",
    "mae",
    "mocov2plus",
    "mocov3",
    "nnbyol",
    "nnclr",
    "nnsiam",
    "ressl",
    "simclr",
    "simsiam",
    "supcon",
    "swav",
    "vibcreg",
    "vicreg",
    "wmse",
)
"""Of solo-learn's main branch; the release has fewer."""
TAUGHT = ("seed", "protoseed")
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
LOCAL = {
    "all4one": "its loss compares the images of one process's batch",
    "barlow_twins": "its loss normalises over one process's batch",
    "deepclusterv2": "its k-means draws centroids from each process's rows",
    "mae": "each process masks patches by draws of its own",
    "mocov3": "its loss compares the images of one process's batch",
    "nnclr": "its loss compares the images of one process's batch",
    "vibcreg": "it normalises over one process's batch",
    "wmse": "it whitens over one process's batch",
}
"""Why processes of solo-learn's method differ from one on the joined batch, all of them alike."""


def methods() -> list[str]:
    """The plugin's, then those of the installed host."""
    return [*PLUGIN, *(name for name in BUILTIN if name in host.load().methods)]
