"""How the settings of a protocol are read beside those that all share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, create_model

from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.lab.evaluation.protocols import PROTOCOLS, Protocol
from solo_ext.lab.evaluation.run_settings import EvalRun

SUITE = "suite"
"""In place of a protocol: several of them, with one report."""


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
