"""What methods say of their settings when training starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext.methods.registry import logger

UNREAD_ALPHA = "the loss does not read the clusters' concentrations"
"""Why ``clusters.alpha`` is idle where only the clusters' means or members count."""


def warn_of_idle_settings(cfg: DictConfig, kwargs_type: type[Any], idle: Mapping[str, str]) -> None:
    """Names in one line the settings that were changed and that nothing reads.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        kwargs_type: the dataclass of these, whose defaults nobody chose.
        idle: why nothing reads them, by the settings' names; that of a section is for all in it.
    """
    changed = _changed(cfg.method_kwargs, kwargs_type)
    reasons: dict[str, list[str]] = {}
    for name, reason in idle.items():
        for key in changed:
            if key == name or key.startswith(f"{name}."):
                reasons.setdefault(reason, []).append(f"method_kwargs.{key}")
    if reasons:
        listed = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
        logger.warning(f"{cfg.method}: settings without effect on training: {listed}")


def idle_in_projector(kwargs: Any, batch_norm: str = "proj_batch_norm") -> dict[str, str]:
    """Settings of a projector's hidden layers where it has none.

    Args:
        kwargs: ``method_kwargs``.
        batch_norm: the name of the setting whether these are normalised.
    """
    if kwargs.proj_layers > 1:
        return {}
    return dict.fromkeys(("proj_hidden_dim", batch_norm), "proj_layers=1 has no hidden layer")


def warn_of_the_floor(
    section: str, tau_plus: float, beta: float, temperature: float, dim: int, watch: str = ""
) -> None:
    """Warns where most anchors can be expected on the debiased estimate's floor.

    Args:
        section: of the config, in which they stand.
        tau_plus: in [0, 1); without an effect at 0.
        beta: 0 or more.
        temperature: above 0.
        dim: D of the embeddings.
        watch: the metric that is the share of those anchors, where there is one.
    """
    # Where independent directions and a positive at cosine 0.9 already reach the floor, a
    # trained backbone will too.
    exponent = (1 + 2 * beta) / (2 * dim * temperature**2) - 0.9 / temperature
    share = math.exp(min(exponent, 0.0))
    if tau_plus > share:
        logger.warning(
            f"{section}.tau_plus={tau_plus} is large for temperature={temperature}: most anchors "
            "will sit on the floor and get no gradient from their negatives"
            + (f" (watch {watch})" if watch else "")
            + f"; take tau_plus below {share:.2g} or a higher temperature"
        )


def _changed(kwargs: DictConfig, kwargs_type: type[Any]) -> list[str]:
    # pydantic is not needed to register a method.
    from solo_ext.config.check import check_method_kwargs

    given: Any = OmegaConf.to_container(kwargs, resolve=True)
    missing = dataclasses.MISSING
    required = {
        f.name: given[f.name]
        for f in dataclasses.fields(kwargs_type)
        if f.default is missing and f.default_factory is missing
    }
    return _differing(given, check_method_kwargs(kwargs_type, required))


def _differing(
    given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Dotted keys of the values that are not the default."""
    found = []
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            found += _differing(value, default, f"{prefix}{name}.")
        elif value != default:
            found.append(f"{prefix}{name}")
    return found
