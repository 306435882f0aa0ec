"""Which trained network a config names as the teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from solo_ext.core.errors import ConfigError

Layout = Literal["run", "moco_v2", "swav", "dino", "timm", "torchvision"]
KEY = "method_kwargs.teacher"
"""Where the settings of the teacher stand in a config."""

_META = "https://dl.fbaipublicfiles.com"
PUBLISHED: dict[str, tuple[str, ...]] = {
    "moco_v2": (f"{_META}/moco/moco_checkpoints/moco_v2_800ep/moco_v2_800ep_pretrain.pth.tar",),
    "swav": (f"{_META}/deepcluster/swav_800ep_pretrain.pth.tar",),
    "dino": (
        f"{_META}/dino/dino_resnet50_pretrain/dino_resnet50_pretrain_full_checkpoint.pth",
        f"{_META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain_full_checkpoint.pth",
    ),
}
"""Where the checkpoints of the official layouts are published."""


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """Where a teacher comes from.

    Attributes:
        layout: ``run``: a run directory or checkpoint of solo-learn or solo_ext; ``moco_v2``,
            ``swav``, ``dino``: files as their authors' code writes them; ``timm``,
            ``torchvision``: the library's own weights, or a local file of them.
        path: the file or run directory; ``None`` lets ``timm`` and ``torchvision`` fetch.
        model: the architecture, with the tag of its weights for ``timm`` (``resnet50.a1_in1k``)
            and ``torchvision`` (``resnet50:IMAGENET1K_V2``). Official files: ``None`` is what the
            file says, else the published one; a torchvision name, one with ``w2`` to ``w5``
            behind it for SwAV's wide ones, or a timm name. A run says it itself.
        model_kwargs: arguments of the model's constructor.
        networks: which networks of a run: ``online``, which ``solo-ext eval`` measures, or
            ``momentum``. Official files: always the one that is meant to be used.
    """

    layout: Layout
    path: str | None = None
    model: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    networks: Literal["online", "momentum"] = "online"


def check_source(source: TeacherSource, key: str = KEY) -> None:
    """Refuses what can be refused without reading the teacher.

    Args:
        source: the teacher.
        key: of its section in the config.

    Raises:
        ConfigError: a setting is missing, names nothing, or is not for this layout.
    """
    layout, path = source.layout, source.path
    if path is None and layout not in ("timm", "torchvision"):
        kind = "a run directory or checkpoint" if layout == "run" else "a file"
        raise ConfigError(
            f"{key}.path", None, f"layout {layout} needs {kind}", _remedy(layout, key)
        )
    if path is not None and not Path(path).exists():
        raise ConfigError(f"{key}.path", path, "there is no such file", _remedy(layout, key))
    if path is not None and layout != "run" and not Path(path).is_file():
        raise ConfigError(f"{key}.path", path, "this is a folder", f"layout {layout} needs a file")
    if layout == "run":
        for name in ("model", "model_kwargs"):
            if getattr(source, name):
                raise ConfigError(
                    f"{key}.{name}",
                    getattr(source, name),
                    "a run says itself what it is",
                    "drop it",
                )
    elif source.networks != "online":
        raise ConfigError(
            f"{key}.networks", source.networks, f"layout {layout} has no choice", "only run has"
        )
    if source.model is None and layout in ("timm", "torchvision"):
        example = "resnet50.a1_in1k" if layout == "timm" else "resnet50:IMAGENET1K_V2"
        raise ConfigError(
            f"{key}.model", None, f"layout {layout} needs a model", f"for example {example}"
        )


def _remedy(layout: Layout, key: str) -> str:
    urls = PUBLISHED.get(layout)
    if urls is None:
        return f"name it by {key}.path=..."
    return f"download {' or '.join(urls)} and name it by {key}.path=..."
