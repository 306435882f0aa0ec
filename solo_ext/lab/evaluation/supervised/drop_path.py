"""The backbone of a subject with stochastic depth."""

from __future__ import annotations

from typing import Any

from torch import nn

from solo_ext import host
from solo_ext.core.errors import ConfigError
from solo_ext.host.backbones import build_backbone
from solo_ext.lab.evaluation.subject import EvalContext


def with_drop_path(subject: EvalContext, rate: float) -> nn.Module:
    """The backbone with its weights, built anew with ``drop_path_rate``.

    Layers are dropped with a probability that grows linearly to ``rate`` (Huang et al., ECCV
    2016, arXiv 1603.09382). At 0 it is :meth:`EvalContext.backbone`, whose own rate stays.

    Raises:
        ConfigError: a backbone that has no stochastic depth.
    """
    own = subject.backbone()
    if not rate:
        return own
    about = subject.cfg["backbone"]
    kwargs: dict[str, Any] = {
        k: v for k, v in (about.get("kwargs") or {}).items() if k != "pretrained"
    }
    try:
        built, _ = build_backbone(
            host.load().backbones,
            about["name"],
            {**kwargs, "drop_path_rate": rate},
            method=subject.cfg.get("method"),
            dataset=subject.model.cfg["data"]["dataset"],
        )
    except (ConfigError, TypeError) as error:
        raise _none(about["name"], rate) from error
    if not any(type(m).__name__ == "DropPath" for m in built.modules()):
        raise _none(about["name"], rate)
    built.load_state_dict(own.state_dict())
    return built


def _none(name: str, rate: float) -> ConfigError:
    return ConfigError(
        "drop_path", rate, f"the backbone {name!r} has no stochastic depth", "leave it at 0"
    )
