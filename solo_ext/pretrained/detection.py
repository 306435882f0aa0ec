"""A ResNet's weights for detection libraries: which networks, names and formats they accept."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision import models

ARCHITECTURES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
"""Names of torchvision; detectron2 and mmdetection have the same networks."""
_NEXT = {f"layer{stage}": f"res{stage + 1}" for stage in range(1, 5)}


def torchvision_twins(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """ResNets of torchvision with a backbone's names and shapes of weights, holding its weights.

    Yields name, and the network without its classifier. Equal names and shapes do not guarantee the
    same network: compare features.

    >>> backbone = models.resnet18()
    >>> backbone.fc = nn.Identity()
    >>> next(torchvision_twins(backbone))[0]
    'resnet18'
    """
    weights = backbone.state_dict()
    shapes = {name: value.shape for name, value in weights.items()}
    for architecture in ARCHITECTURES:
        with torch.device("meta"):
            wanted = models.get_model(architecture, weights=None).state_dict()
        if shapes != {n: v.shape for n, v in wanted.items() if not n.startswith("fc.")}:
            continue
        twin = models.get_model(architecture, weights=None)
        twin.fc = nn.Identity()
        twin.load_state_dict(weights)
        yield architecture, twin.eval()


def detectron2_settings(architecture: str, mean: Sequence[float], std: Sequence[float]) -> str:
    """Settings that tell detectron2 the ResNet and its images, in its command line's format.

    ``mean`` and ``std`` are per channel, of images in [0, 1].

    >>> detectron2_settings("resnet50", [0.5] * 3, [0.25] * 3).split(" MODEL.")[3]
    'RESNETS.DEPTH 50'
    """
    # detectron2's images have values up to 255.
    shift, scale = ([round(255 * v, 3) for v in values] for values in (mean, std))
    with torch.device("meta"):
        model = models.get_model(architecture, weights=None)
    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    bottleneck = isinstance(model.layer1[0], models.resnet.Bottleneck)
    settings = {
        "DEPTH": 2 + (3 if bottleneck else 2) * sum(map(len, stages)),
        "NUM_GROUPS": model.groups,
        "WIDTH_PER_GROUP": model.base_width,
    }
    if not bottleneck:
        # detectron2's default is the 256 of the other ResNets.
        settings["RES2_OUT_CHANNELS"] = 64
    listed = " ".join(f"MODEL.RESNETS.{name} {value}" for name, value in settings.items())
    return (
        f"INPUT.FORMAT RGB MODEL.PIXEL_MEAN {shift} MODEL.PIXEL_STD {scale} {listed} "
        "MODEL.RESNETS.STRIDE_IN_1X1 False"
    )


def save_weights(backbone: nn.Module, file: Path, *, detectron2: bool) -> None:
    """Writes a ResNet's weights in the format of torchvision and mmdetection, or of detectron2.

    detectron2 reads a pickle of arrays with names of its own.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "backbone.pth"
    >>> save_weights(nn.Linear(3, 2), file, detectron2=False)
    >>> torch.load(file)["weight"].shape
    torch.Size([2, 3])
    """
    weights = {name: value.clone() for name, value in backbone.state_dict().items()}
    if not detectron2:
        torch.save(weights, file)
        return
    arrays = {name: value.numpy() for name, value in _detectron2_names(weights).items()}
    content = {"model": arrays, "__author__": "solo_ext", "matching_heuristics": True}
    with file.open("wb") as opened:
        pickle.dump(content, opened)


def _detectron2_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under detectron2's names, without the numbers of batches, which it does not have."""
    renamed = {}
    for name, value in weights.items():
        stage, dot, rest = name.partition(".")
        place = f"{_NEXT[stage]}{dot}{rest}" if stage in _NEXT else f"stem.{name}"
        place = place.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        if not name.endswith("num_batches_tracked"):
            renamed[re.sub(r"\bbn(\d)\b", r"conv\1.norm", place)] = value
    return renamed
