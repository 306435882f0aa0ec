"""The random generators of a process, as a checkpoint can hold them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """State of the generators of torch, of this process's device, of Python and of NumPy."""
    version, keys, gauss = random.getstate()
    name, words, place, has_gauss, cached = cast(
        Any,
        np.random.get_state(legacy=True),  # noqa: NPY002 (others may draw from it)
    )
    words = torch.from_numpy(words.astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(keys), gauss),
        "numpy": (str(name), words, place, has_gauss, cached),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what :func:`random_state` gave; a device's, where there is one."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    words = words.numpy().astype(np.uint32)
    np.random.set_state((name, words, place, has_gauss, cached))  # noqa: NPY002
