"""Starts a backbone from weights that exist: ``backbone.weights`` of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from solo_ext.config.schema import Backbone
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.host.names import PREFIX
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained.exported import export_file, read_export
from solo_ext.pretrained.files import file_digest
from solo_ext.pretrained.libraries import CLASSIFIERS, fitted, read_weights
from solo_ext.pretrained.recognise import recognise_source
from solo_ext.pretrained.runs import checkpoint_in, run_backbone
from solo_ext.pretrained.teachers import load_teacher, split_file

KEY = "backbone.weights"
_RESIZED = ("pos_embed", "relative_position_bias_table")
"""Ends of the keys whose tensors timm may resize: tables of positions."""
_LEFT_OUT = (*CLASSIFIERS, "mask_token")
_SHOWN = 3


@dataclass(frozen=True)
class Start:
    """What a backbone started from, for the records of its run.

    Attributes:
        source: what ``backbone.weights`` names.
        title: kind and name of the file or model.
        digest: first 16 hex digits of the file's SHA-256; of the weights' if there is no file.
        file: whether that was a file.
        taken: number of tensors that the backbone took, which is all that it has.
        resized: keys of the tables of positions that were resized to the backbone.
        left_out: keys of the file that are not the backbone's.

    >>> digest, model = "0123456789abcdef", "resnet18.a1_in1k of timm"
    >>> start = Start("timm/resnet18", model, digest, file=False, taken=120)
    >>> print(start)
    backbone.weights: all 120 tensors from resnet18.a1_in1k of timm (0123456789abcdef)
    """

    source: str
    title: str
    digest: str
    file: bool
    taken: int
    resized: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [f"{KEY}: all {self.taken} tensors from {self.title} ({self.digest})"]
        if self.resized:
            parts.append(f"resized: {_listed(self.resized)}")
        if self.left_out:
            parts.append(f"left out: {_listed(self.left_out)}")
        return "; ".join(parts)

    def record(self) -> dict[str, Any]:
        """The attributes, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Given:
    """Weights of a backbone by key, ``prefix`` being that of the keys in their file."""

    title: str
    digest: str
    weights: dict[str, Tensor]
    prefix: str = ""
    others: Sequence[str] = ()
    file: bool = True


def start_from(settings: Backbone, network: nn.Module, *further: nn.Module) -> Start:
    """Loads what ``backbone.weights`` names into a backbone, and the result into further ones.

    Every tensor of the backbone is taken from the file. Classifiers, heads, prototypes and momentum
    networks of the file are left out. The positions of timm's transformers are resized, as timm
    does when it fetches the same weights.

    Args:
        settings: ``backbone`` of the run's config.
        network: its backbone.
        further: networks that must equal it, such as the momentum backbone.

    Raises:
        ConfigError: there are no such weights, their layout is not known, or they do not fit: a
            tensor is missing, too many, of another shape, or has values that are not finite.
        UserError: the file cannot be read.

    >>> import tempfile
    >>> import timm
    >>> import torch
    >>> file = tempfile.mkdtemp() + "/weights.pth"
    >>> torch.save(timm.create_model("resnet10t", channels=(8, 8, 8, 8)).state_dict(), file)
    >>> network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)
    >>> start = start_from(Backbone(name="timm/resnet10t", weights=file), network)
    >>> start.taken, start.left_out
    (90, ['fc.weight', 'fc.bias'])
    """
    word = str(settings.weights)
    given = _read(word)
    fitted, resized, left_out = _fitted(settings, network, given)
    network.load_state_dict(fitted)
    for copy in further:
        copy.load_state_dict(network.state_dict())
    others = [*given.others, *(given.prefix + key for key in left_out)]
    return Start(word, given.title, given.digest, given.file, len(fitted), resized, others)


def check_start(settings: Backbone, network: nn.Module) -> None:
    """Refuses a file of ``backbone.weights`` that a backbone cannot start from.

    Weights that a library would fetch are not looked at.

    Raises:
        ConfigError: as :func:`start_from`.
        UserError: the file cannot be read.

    >>> check_start(Backbone(name="resnet18", weights="nowhere.pth"), nn.Identity())
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: backbone.weights='nowhere.pth': no such file or folder; ...
    """
    if settings.weights is not None and recognise_source(settings.weights, KEY).path is not None:
        start_from(settings, network)


def weights_digest(word: str) -> str | None:
    """Digest of the file that a word names; ``None`` if there is none, as for a library's model.

    >>> weights_digest("timm/resnet18") is None
    True
    """
    path = Path(word).expanduser()
    if not word or not path.exists():
        return None
    try:
        if path.is_file():
            return file_digest(path)
        source = recognise_source(word, KEY)
        run = source.layout == "run"
        return file_digest(checkpoint_in(path) if run else _file_of(source))
    except (OSError, UserError):
        return None


def _file_of(source: TeacherKwargs) -> Path:
    path = Path(str(source.path))
    return export_file(path) if source.layout == "export" else path


def _read(word: str) -> _Given:
    source = recognise_source(word, KEY)
    layout = source.layout
    if source.path is None:
        return _of_library(source, word)
    path = _file_of(source)
    if layout == "run":
        file, digest, weights, others = run_backbone(path)
        return _Given(f"run {str(file)!r}", digest, weights, "backbone.", others)
    if layout == "export":
        _, weights = read_export(path)
        return _Given(f"export {str(path)!r}", file_digest(path), weights)
    if layout in ("timm", "torchvision"):
        title = f"checkpoint {str(path)!r}"
        prefix, _, weights = read_weights(path, title)
        return _Given(title, file_digest(path), weights, prefix)
    parts = split_file(layout, path)
    return _Given(parts.title, file_digest(path), parts.backbone, parts.prefix, parts.others)


def _of_library(source: TeacherKwargs, word: str) -> _Given:
    try:
        loaded = load_teacher(source)
    except UserError as error:
        problem = str(error).partition("; fetch ")[0]
        remedy = "see to the connection, or name a file with these weights"
        raise ConfigError(KEY, word, problem, remedy) from error
    title = loaded.description.partition(":")[0]
    return _Given(title, loaded.digest, loaded.backbone.state_dict(), file=False)


def _fitted(
    settings: Backbone, network: nn.Module, given: _Given
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Weights for every key of a network, which of them were resized, and the keys left out."""
    own = network.state_dict()
    kept = {k: v for k, v in given.weights.items() if k in own or not k.startswith(CLASSIFIERS)}
    weights, resized = fitted(network, kept), []
    for key, before in given.weights.items():
        if key in weights and weights[key].shape != before.shape:
            if key.endswith(_RESIZED):
                resized.append(key)
            else:
                # timm would resample this tensor too, which is another network than the file's.
                weights[key] = before
    _refuse(settings, given, own, weights)
    for key in own:
        if weights[key].is_floating_point() and not weights[key].isfinite().all():
            problem = f"{given.prefix}{key} of {given.title} has values that are not finite"
            raise ConfigError(KEY, settings.weights, problem, "is the file damaged?")
    left_out = [k for k in given.weights if k not in own and k.startswith(_LEFT_OUT)]
    return {key: weights[key] for key in own}, resized, left_out


def _refuse(
    settings: Backbone,
    given: _Given,
    own: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> None:
    """Refuses weights that are not exactly those of the backbone, besides a classifier."""
    missing = [k for k in own if k not in weights]
    shaped = [k for k in own if k in weights and weights[k].shape != own[k].shape]
    unknown = [k for k in weights if k not in own and not k.startswith(_LEFT_OUT)]
    if not (missing or shaped or unknown):
        return
    backbone = f"backbone {settings.name!r}"
    faults = [
        f"{backbone} has {_with_shapes(missing, own)}, which the file lacks" if missing else "",
        "; ".join(
            f"{given.prefix}{k} is {tuple(weights[k].shape)} in the file and {tuple(own[k].shape)} "
            "in the backbone"
            for k in shaped[:_SHOWN]
        ),
        f"{backbone} has no {_with_shapes(unknown, weights)}" if unknown else "",
    ]
    told = "; ".join(filter(None, faults))
    who = "it" if given.title.endswith(repr(settings.weights)) else given.title
    problem = f"{who} does not fit {backbone} ({told})"
    raise ConfigError(KEY, settings.weights, problem, _remedy(settings, own, weights, shaped))


def _remedy(
    settings: Backbone,
    own: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    shaped: Sequence[str],
) -> str:
    only_stem = len(shaped) == 1 and own[shaped[0]].ndim == 4
    if only_stem and "patch_embed" in shaped[0]:
        return f"set backbone.kwargs.patch_size to {weights[shaped[0]].shape[-1]}"
    if only_stem and own[shaped[0]].shape[-1] < weights[shaped[0]].shape[-1]:
        if settings.name.startswith(PREFIX):
            return "set backbone.kwargs.small_stem to false, which keeps the stem of the file"
        return (
            "on CIFAR solo-learn gives this backbone a stem for small images; take backbone.name="
            f"{PREFIX}{settings.name} with backbone.kwargs.small_stem=false"
        )
    return "name the backbone of these weights by backbone.name and backbone.kwargs"


def _with_shapes(keys: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{k} {tuple(tensors[k].shape)}" for k in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


def _listed(keys: Sequence[str]) -> str:
    more = f", ... ({len(keys)})" if len(keys) > _SHOWN else ""
    return f"{', '.join(keys[:_SHOWN])}{more}"
