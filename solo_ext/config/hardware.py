"""Devices, accelerators and strategies of a config, checked against Lightning and the machine."""

from __future__ import annotations

from typing import Any

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError, nearest


def check_hardware(run: RunConfig) -> None:
    """Refuses an accelerator or strategy that Lightning does not know or the machine lacks.

    Raises:
        ConfigError: names the first of them.
    """
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    known: dict[str, Any] = {n: AcceleratorRegistry[n]["accelerator"] for n in AcceleratorRegistry}
    there = sorted(n for n, accelerator in known.items() if accelerator.is_available())
    if {"cuda", "mps"} & set(there):
        there.append("gpu")
    name = run.accelerator
    if name not in (*known, "auto", "gpu"):
        raise ConfigError(
            "accelerator", name, "unknown accelerator", nearest(name, [*known, "auto", "gpu"])
        )
    if name != "auto" and name not in there:
        raise ConfigError(
            "accelerator",
            name,
            "this machine has none",
            f"allowed here: auto, {', '.join(there)}; `solo-ext doctor` says what torch sees",
        )
    strategies = [*StrategyRegistry.available_strategies(), "auto"]
    if run.strategy not in strategies:
        raise ConfigError(
            "strategy",
            run.strategy,
            "unknown strategy",
            nearest(run.strategy, strategies),
        )
    world_size(run)
    on_cpu = name == "cpu" or (name == "auto" and set(there) == {"cpu"})
    if on_cpu and isinstance(run.devices, str) and "," in run.devices:
        raise ConfigError(
            "devices", run.devices, "the CPU has no numbered devices", "give their number"
        )


def world_size(run: RunConfig) -> int:
    """Number of processes that a config asks for; ``auto`` counts the machine's accelerators.

    Raises:
        ConfigError: text that is not a number or list of devices.

    >>> world_size(RunConfig.model_construct(devices="0,1", accelerator="gpu", num_nodes=2))
    4
    """
    devices = run.devices
    if isinstance(devices, list):
        count = len(devices)
    elif isinstance(devices, int):
        count = devices
    elif devices.strip() in ("auto", "-1"):
        import torch

        count = max(torch.cuda.device_count(), 1) if run.accelerator != "cpu" else 1
    else:
        # "2" means two devices; "0,1" and "3," are lists of devices.
        words = [w.strip() for w in devices.split(",") if w.strip()]
        listed = "," in devices
        if not words or not all(w.isdecimal() for w in words) or (not listed and int(words[0]) < 1):
            raise ConfigError(
                "devices", devices, "not a number of devices", "give a number, a list, or auto"
            )
        count = len(words) if listed else int(words[0])
    return count * int(run.num_nodes)
