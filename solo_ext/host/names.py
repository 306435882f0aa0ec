"""Names of backbones, read from files: to import timm or solo-learn takes seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from solo_ext.core.errors import ConfigError, suggest_name
from solo_ext.host import HostInfo

PREFIX = "timm/"
RELEASE_BACKBONES = (
    "resnet18",
    "resnet50",
    *(
        f"{family}_{size}"
        for family in ("vit", "swin")
        for size in ("tiny", "small", "base", "large")
    ),
)
"""Those of solo-learn 1.0.2."""
_REGISTERED = re.compile(r"^@register_model\s*\n(?:@.*\n)*def (\w+)", re.MULTILINE)


def table_keys(file: Path, table: str) -> list[str]:
    """Keys of the mapping that a file, or a class in it, assigns to a name.

    >>> from solo_ext.host import detect
    >>> "simclr" in table_keys(detect().path / "methods" / "__init__.py", "METHODS")
    True
    """
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    return []


def own_backbones(info: HostInfo) -> Collection[str]:
    """Names of solo-learn's own backbones.

    >>> from solo_ext.host import detect
    >>> "resnet18" in own_backbones(detect())
    True
    """
    if info.generation == "1.0.2":
        return RELEASE_BACKBONES
    return table_keys(info.path / "methods" / "base.py", "_BACKBONES")


def timm_models() -> list[str]:
    """Names of timm's models, without those that it calls deprecated.

    >>> "resnet18" in timm_models()
    True
    """
    return _REGISTERED.findall(timm_source())


@functools.cache
def timm_source() -> str:
    """The text of timm's files of models.

    >>> "def resnet18(" in timm_source()
    True
    """
    package = importlib.util.find_spec("timm")
    assert package is not None
    assert package.origin is not None
    files = (Path(package.origin).parent / "models").rglob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))


def unknown_backbone(name: str, own: Iterable[str]) -> ConfigError:
    """Error for a name that is neither the host's nor timm's.

    >>> unknown_backbone("resnet18", []).remedy
    "did you mean 'timm/resnet18'?"
    """
    models = timm_models()
    if name.startswith(PREFIX):
        guess = suggest_name(name, [PREFIX + model for model in models], show=0)
        remedy = f"{guess} see timm.list_models()".strip()
    elif name.partition(".")[0] in models:
        remedy = f"did you mean {PREFIX + name!r}?"
    else:
        remedy = f"{suggest_name(name, own, show=30)}, timm/<model>"
    return ConfigError("backbone.name", name, "unknown backbone", remedy)
