"""Exported backbones: their metadata, and reading them back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Len
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from solo_ext import host
from solo_ext.config.check import validated
from solo_ext.config.schema import Backbone
from solo_ext.core.errors import ConfigError, UserError, first_line
from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt, Section
from solo_ext.data.transforms import Transform, eval_transform
from solo_ext.host.backbones import BackboneTable, build_backbone
from solo_ext.host.names import PREFIX
from solo_ext.pretrained.files import check_fit

KEY = "solo_ext"
"""The only key of the file's metadata: safetensors writes several keys in any order."""
WEIGHTS = "model.safetensors"
"""The file of weights in a folder for timm; the name is timm's."""
FETCHING = (
    *("cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"),
    "weights",
)
"""Arguments that read other files or the internet; the export already contains the weights."""


class Metadata(Section):
    """What a file of weights says, as JSON, about the network and its images.

    ``input_size`` is the side of the large crops of pretraining; ``mean`` and ``std`` are per
    channel, of images in [0, 1].

    >>> about = Metadata(
    ...     solo_ext="1.0",
    ...     backbone={"name": "resnet18", "kwargs": {}},
    ...     features_dim=512,
    ...     input_size=32,
    ...     mean=[0.5, 0.5, 0.5],
    ...     std=[0.25, 0.25, 0.25],
    ...     method="pcl",
    ...     dataset="cifar10",
    ...     epoch=200,
    ...     checkpoint_sha256="0123456789abcdef",
    ... )
    >>> about.backbone.name, about.format_version
    ('resnet18', 1)
    """

    format_version: Literal[1] = 1
    solo_ext: str
    backbone: Backbone
    features_dim: PositiveInt
    input_size: PositiveInt
    mean: Annotated[list[float], Len(3, 3)]
    std: Annotated[list[PositiveFloat], Len(3, 3)]
    method: str | None
    dataset: str
    epoch: NonNegativeInt
    checkpoint_sha256: str


@dataclass(frozen=True)
class Exported:
    """A backbone on the CPU, in eval mode: images (N, 3, S, S) to features (N, D).

    D is ``features_dim`` of the metadata, S is ``input_size``.

    >>> from PIL import Image
    >>> about = Metadata.model_construct(input_size=32, mean=[0.5] * 3, std=[0.5] * 3)
    >>> Exported(nn.Identity(), about).transform()(Image.new("RGB", (40, 36))).shape
    torch.Size([3, 32, 32])
    """

    backbone: nn.Module
    metadata: Metadata

    def transform(self) -> Transform:
        """The evaluation transform, from a PIL image to the backbone's input (3, S, S)."""
        about = self.metadata
        return eval_transform(about.input_size, about.mean, about.std)


def load_exported(path: str | Path) -> Exported:
    """Loads the folder or the file of ``solo-ext export --format timm`` or ``safetensors``.

    No code in the file is run, and nothing else is read or downloaded. Backbones of timm do not
    need solo-learn.

    Raises:
        UserError: the file is no export, is damaged or changed, or cannot be rebuilt here.

    >>> load_exported("nothing.safetensors")
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: 'nothing.safetensors': no such file; give what `solo-ext expo...
    """
    file = export_file(path)
    metadata, weights = read_export(file)
    backbone, features_dim = _build(metadata, file)
    name = metadata.backbone.name
    check_fit(backbone, weights, f"export {str(file)!r}", f"backbone {name!r}", "export it again")
    if features_dim != metadata.features_dim:
        raise _changed(
            file, f"features_dim={metadata.features_dim}, and {name!r} has {features_dim}"
        )
    backbone.load_state_dict(weights)
    return Exported(backbone.eval(), metadata)


def export_file(path: str | Path) -> Path:
    """The file of weights of an export, which is a folder or this file.

    >>> export_file("backbone.safetensors")
    PosixPath('backbone.safetensors')
    """
    path = Path(path)
    return path / WEIGHTS if path.is_dir() else path


def read_export(file: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """Reads an export's description of itself and its weights, and builds no network.

    Raises:
        UserError: there is no such file, or it is no export.

    >>> read_export(Path("nothing.safetensors"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: 'nothing.safetensors': no such file; give what `solo-ext expo...
    """
    if not file.is_file():
        raise UserError(f"{str(file)!r}: no such file; give what `solo-ext export` wrote")
    try:
        with safe_open(file, framework="pt") as content:
            said = (content.metadata() or {}).get(KEY)
            weights = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"export {str(file)!r} cannot be read: {error}") from error
    if said is None:
        raise UserError(f"{str(file)!r} is no export: its metadata has no {KEY!r}")
    try:
        held = from_json(said)
        if not isinstance(held, dict):
            raise ValueError(f"metadata is a {type(held).__name__}, not a mapping")
        return validated(Metadata, held), weights
    except (ConfigError, ValueError) as error:
        raise _changed(file, str(error)) from None


def _build(metadata: Metadata, file: Path) -> tuple[nn.Module, int]:
    name, kwargs = metadata.backbone.name, metadata.backbone.kwargs
    fetching = [key for key in kwargs if key in FETCHING]
    if fetching:
        raise _changed(file, f"backbone.kwargs.{fetching[0]} names weights outside of the file")
    table = BackboneTable() if name.startswith(PREFIX) else host.load().backbones
    try:
        return build_backbone(table, name, kwargs, method=metadata.method, dataset=metadata.dataset)
    except Exception as error:
        # Constructors of different authors raise different errors for a wrong argument.
        raise UserError(
            f"export {str(file)!r} cannot be rebuilt: {first_line(error)}; it was written by "
            f"solo_ext {metadata.solo_ext}"
        ) from error


def _changed(file: Path, reason: str) -> UserError:
    return UserError(f"export {str(file)!r} was changed or is of another version: {reason}")
