"""Settings that every protocol shares, and how they are read beside a protocol's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, create_model

from solo_ext.config.check import validated
from solo_ext.config.schema import Free, HuggingFace, Section
from solo_ext.config.types import NonNegativeInt, PositiveInt
from solo_ext.errors import ConfigError, nearest
from solo_ext.evaluation.protocols import PROTOCOLS, Protocol

SUITE = "suite"
"""In place of a protocol: several of them, with one report."""
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


def read_settings(protocol: str, settings: Mapping[str, Any]) -> tuple[EvalRun, Protocol]:
    """Checks the settings of one protocol together with the shared ones.

    Raises:
        ConfigError: unknown protocol or key, or a value that it does not take.
    """
    if protocol not in PROTOCOLS:
        names = (*PROTOCOLS, SUITE)
        raise ConfigError(
            "protocol", protocol, "unknown protocol", nearest(protocol, names, show=40)
        )
    kind = PROTOCOLS[protocol]
    # One model of both, so that a misspelt key is compared with all that are valid.
    joint = create_model("Evaluation", __base__=(kind, EvalRun))
    checked = validated(TypeAdapter(joint), settings)
    values = checked.model_dump()
    own = kind.model_validate({k: values[k] for k in kind.model_fields})
    return EvalRun.model_validate({k: values[k] for k in EvalRun.model_fields}), own
