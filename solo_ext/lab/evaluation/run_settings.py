"""Settings that every protocol shares."""

from __future__ import annotations

from typing import Literal

import torch

from solo_ext.config.schema import Free, HuggingFace, Section
from solo_ext.config.types import NonNegativeInt, PositiveInt

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class EvalData(Section):
    """``data`` of an evaluation; what is not given is as in pretraining."""

    train_path: str | None = None
    val_path: str | None = None
    format: Literal["image_folder", "h5", "huggingface", "dali"] | None = None
    huggingface: HuggingFace | None = None
    unreadable: Literal["refuse", "skip"] | None = None


class EvalDALI(Section):
    """``dali`` of an evaluation; what is not given is as in pretraining, or ``gpu``."""

    device: Literal["cpu", "gpu"] | None = None


class EvalRun(Section):
    """Settings that every protocol shares.

    ``pretrained``, ``model_seed`` and ``model_kwargs`` are for models of timm.
    """

    data: EvalData = EvalData()
    dali: EvalDALI = EvalDALI()
    crop_size: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    num_workers: NonNegativeInt | None = None
    device: str = "auto"
    out: str | None = None
    features_dir: str | None = None
    features_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    pretrained: bool = True
    model_seed: NonNegativeInt = 0
    model_kwargs: Free = {}
