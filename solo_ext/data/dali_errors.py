"""What goes wrong with DALI, in one line."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from solo_ext.core.errors import ConfigError, UserError

INSTALL = "pip install 'solo-ext[dali-cuda12]' or 'solo-ext[dali-cuda13]', after your CUDA"
_READ = "remove it or replace it; data.format=image_folder reads with Pillow instead"


def dali_installed() -> bool:
    """Whether ``nvidia.dali`` can be found."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except (ImportError, ValueError):
        return False


def nvidia_dali() -> Any:
    """The module ``nvidia.dali`` with its PyTorch plugin, imported when it is first needed."""
    # As Any: its own type hints know neither enumerations nor a missing GPU.
    found: Any = importlib.import_module("nvidia.dali")
    importlib.import_module("nvidia.dali.plugin.pytorch")
    return found


def device_of(cfg: Mapping[str, Any]) -> str:
    """``dali.device`` of a config, once it is known that DALI can run there.

    Raises:
        ConfigError: DALI is not installed, or there is no GPU for it.
    """
    if not dali_installed():
        raise ConfigError(
            "data.format",
            "dali",
            "NVIDIA DALI is not installed",
            f"{INSTALL}; or use data.format=image_folder",
        )
    import torch

    device = str((cfg.get("dali") or {}).get("device") or "gpu")
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "dali.device", device, "torch sees no CUDA device here", "set dali.device=cpu"
        )
    return device


def cannot_skip() -> ConfigError:
    """The error for ``data.unreadable=skip`` with DALI."""
    return ConfigError(
        "data.unreadable",
        "skip",
        "DALI stops at an image that it cannot read",
        "set it to refuse and remove such images, or use data.format=image_folder",
    )


def unreadable(error: RuntimeError, files: Sequence[str]) -> Exception:
    """The error to raise for a pipeline that failed: one that names the file, if it was a file.

    Args:
        error: what DALI raised.
        files: that DALI may have been reading.
    """
    text = str(error)
    named = re.search(r"(?:Failed to decode sample #\d+ :|File mapping failed:) *(.+)", text)
    if named and named.group(1).strip() in files:
        return _refusal(named.group(1).strip())
    # Some decoders do not say which file it was.
    if "readers.file" in text or "decoders.image" in text or "decoders.Image" in text:
        found = next((file for file in files if not _decodes(file)), None)
        if found is not None:
            return _refusal(found)
    return error


def _refusal(file: str) -> UserError:
    return UserError(f"DALI cannot read the image {file!r}: truncated, empty or no image; {_READ}")


def _decodes(file: str) -> bool:
    dali = nvidia_dali()

    def single() -> Any:
        return dali.fn.decoders.image(dali.fn.readers.file(files=[file])[0], device="cpu")

    try:
        dali.pipeline_def(single)(batch_size=1, num_threads=1, device_id=None).run()
    except RuntimeError:
        return False
    return True
