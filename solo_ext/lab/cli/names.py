"""Refuses unknown names in a config by what files say, before torch is imported.

The checks of a run itself look into the tables that imports fill. They say the same, but seconds
later.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.schema import OPTIMIZER_KWARGS
from solo_ext.core.errors import unknown_name
from solo_ext.host import detect
from solo_ext.host.names import PREFIX, own_backbones, timm_source, unknown_backbone
from solo_ext.lab.cli.listing import listed_losses, listed_methods, losses_of_metric
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.names import unknown_method


def check_names(config: Mapping[str, Any]) -> None:
    """Refuses a method, backbone, optimiser or loss that neither solo-learn nor we have.

    It leaves a name to the run if code could still register it: code of another package, or of a
    changed solo-learn, whose files then mention the name.

    Args:
        config: one that :func:`solo_ext.config.check.check_sections` has passed.

    Raises:
        ConfigError: an unknown name, or an unknown setting of one of solo-learn's methods.

    >>> names = {"method": "pcl", "backbone": {"name": "resnet18"}, "optimizer": {"name": "sgd"}}
    >>> check_names(names)
    """
    methods = listed_methods(host := detect())
    others = {row["origin"] for row in (*methods, *listed_losses())} - {"solo_ext", "solo-learn"}
    if others or "torch" in sys.modules:
        return
    files = host.path.rglob("*.py")
    source = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    method, kwargs = config["method"], config.get("method_kwargs") or {}
    names = [row["name"] for row in methods]
    if method not in names and not _mentioned(method, source):
        raise unknown_method(method, names, host.generation)
    if method in BUILTIN_KWARGS:
        check_method_kwargs(BUILTIN_KWARGS[method], kwargs)
    loss = kwargs.get("loss") if method == "metric" else None
    known = [row["name"] for row in listed_losses()]
    if isinstance(loss, str) and loss not in known and not loss.startswith("pml/"):
        raise unknown_name("method_kwargs.loss", loss, "loss", losses_of_metric())
    backbone, own = config["backbone"]["name"], own_backbones(host)
    architecture = backbone.removeprefix(PREFIX).partition(".")[0]
    of_timm = timm_source() if backbone.startswith(PREFIX) else ""
    if backbone not in own and not _mentioned(architecture, source + of_timm):
        raise unknown_backbone(backbone, own)
    optimizer = config["optimizer"]["name"]
    if optimizer not in OPTIMIZER_KWARGS and not _mentioned(optimizer, source):
        raise unknown_name("optimizer.name", optimizer, "optimiser", OPTIMIZER_KWARGS)


def _mentioned(name: str, source: str) -> bool:
    """Whether code has the name in quotation marks, or defines a function of that name."""
    word = re.escape(name)
    return re.search(rf"""(["']){word}\1|def {word}\(""", source) is not None
