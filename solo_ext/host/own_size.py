"""Classification transforms of main for ``data.dataset=custom`` that leave small images small."""

from __future__ import annotations

from typing import Any

from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import transforms

LARGE = 224


class UpToLarge:
    """Applies ``large`` to images whose shorter side reaches 224 pixels, ``small`` to others.

    Args:
        large: transform of upstream.
        small: makes a transform for an image of the given shorter side.
    """

    def __init__(self, large: Any, small: Any) -> None:
        self.large, self.small = large, small

    def __call__(self, image: Image.Image) -> Any:
        side = min(image.size)
        return self.large(image) if side >= LARGE else self.small(side)(image)


def _crop(side: int) -> Any:
    return transforms.RandomResizedCrop(side, scale=(0.08, 1.0))


def upstream_pipelines() -> dict[str, Any]:
    """``T_train`` and ``T_val`` as main's ``build_custom_pipeline`` returns them."""
    end = [
        transforms.ToTensor(),
        transforms.Normalize(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD),
    ]
    resize = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(LARGE)])
    train = UpToLarge(_crop(LARGE), _crop)
    return {
        "T_train": transforms.Compose([train, transforms.RandomHorizontalFlip(), *end]),
        "T_val": transforms.Compose([UpToLarge(resize, transforms.CenterCrop), *end]),
    }
