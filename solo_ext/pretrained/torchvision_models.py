"""Any torchvision model as a teacher, with its own weights or those of a local file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchvision
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from solo_ext.core.errors import ConfigError, UserError, nearest
from solo_ext.pretrained.architectures import (
    building,
    torchvision_model,
    torchvision_names,
    without_classifier,
)
from solo_ext.pretrained.files import file_digest, state_digest
from solo_ext.pretrained.layouts import check_library_fit, image_side, named, read_library_weights
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.teacher_source import KEY, TeacherSource


def load_torchvision(source: TeacherSource) -> LoadedTeacher:
    """Loads a torchvision model without its last linear layer.

    ``path`` is a file of weights as torchvision keeps them; without it torchvision fetches those
    of the tag behind the colon, or of its default tag. Mean, deviation and size are the tag's; a
    local file has ImageNet's, unless a tag says other.

    Raises:
        UserError: unknown model or tag, weights that cannot be fetched, or of another model.
    """
    assert source.model is not None
    name, _, tag = source.model.partition(":")
    weights = _tagged(source.model, name, tag)
    note = ""
    if source.path is not None:
        path = Path(source.path)
        title, digest = named(path, "torchvision"), file_digest(path)
        with building(name, source.model_kwargs):
            network = torchvision_model(name, source.model_kwargs)
        network, classifier = without_classifier(network, name)
        held, prefix, note = read_library_weights(path, title)
        network.load_state_dict(check_library_fit(network, held, [classifier], title, name, prefix))
    else:
        title = f"torchvision's {weights.name}"
        network = without_classifier(_fetched(name, weights, source.model_kwargs), name)[0]
        digest = state_digest(network.state_dict())
    preset = weights.transforms()
    own = tag or source.path is None
    return assemble(
        network,
        Projection(),
        name=f"{name} of {title}",
        digest=digest,
        mean=preset.mean if own else IMAGENET_DEFAULT_MEAN,
        std=preset.std if own else IMAGENET_DEFAULT_STD,
        input_size=image_side(source.model_kwargs, preset.crop_size[0]),
        notes=[note] if note else [],
    )


def _tagged(given: str, name: str, tag: str) -> Any:
    """The entry of torchvision's weights that is meant."""
    if name not in torchvision_names():
        raise ConfigError(
            f"{KEY}.model", given, "unknown architecture", nearest(name, torchvision_names())
        )
    entries = torchvision.models.get_model_weights(name)
    tags = [entry.name for entry in entries]
    if tag and tag not in tags:
        remedy = nearest(tag, tags)
        raise ConfigError(f"{KEY}.model", given, f"torchvision has no weights {tag!r}", remedy)
    return entries[tag] if tag else entries.DEFAULT


def _fetched(name: str, weights: Any, kwargs: dict[str, Any]) -> nn.Module:
    try:
        with building(name, kwargs):
            return torchvision.models.get_model(  # type: ignore[no-any-return]
                name, weights=weights, progress=False, **kwargs
            )
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"torchvision cannot get {weights}: {reason}; fetch {weights.url} where there is a "
            f"network and name the file by {KEY}.path"
        ) from error
