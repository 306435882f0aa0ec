"""Whether an image looks the same in every epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STRENGTHS = ("brightness", "contrast", "saturation", "hue")
_FIXED_IF_CERTAIN = ("grayscale", "solarization", "equalization", "horizontal_flip")


def first_random_setting(
    augmentations: Sequence[Mapping[str, Any]], mix: Mapping[str, Any] | None = None
) -> str | None:
    """The first setting that leaves something to chance.

    Args:
        augmentations: the config's list of pipelines, defaults filled in.
        mix: the section ``data.mix``.

    Returns:
        Its dotted key and value, for example ``augmentations.0.rrc.enabled=true``; ``None`` where
        every view is fixed.
    """
    for place, pipeline in enumerate(augmentations):
        setting = _random_setting(pipeline)
        if setting is not None:
            return f"augmentations.{place}.{setting}"
    if mix is not None and mix["prob"]:
        return f"data.mix.prob={mix['prob']}"
    return None


def _random_setting(a: Mapping[str, Any]) -> str | None:
    # Even a crop of the whole area may lose a line of pixels to rounding.
    if a["rrc"]["enabled"]:
        return "rrc.enabled=true"
    for name in ("rand_augment", "auto_augment"):
        if a.get(name):
            return f"{name}={a[name]}"
    jitter, blur = a["color_jitter"], a["gaussian_blur"]
    if jitter["prob"] and any(jitter[k] for k in _STRENGTHS):
        return f"color_jitter.prob={jitter['prob']}"
    if blur["prob"]:
        return f"gaussian_blur.prob={blur['prob']}"
    for name in _FIXED_IF_CERTAIN:
        if a[name]["prob"] not in (0, 1):
            return f"{name}.prob={a[name]['prob']}"
    return None
