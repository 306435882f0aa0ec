"""What the official checkpoint layouts have in common: wrappers, prefixes, exact keys."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.pretrained.architectures import build_architecture
from solo_ext.pretrained.files import check_fit, holds_values, read_checkpoint, read_safetensors
from solo_ext.pretrained.teacher_source import KEY, TeacherSource

_PARALLEL = "module."
_SOLVER = (
    *("amp", "arch", "args", "best_acc1", "epoch", "fp16_scaler"),
    *("lr_scheduler", "optimizer", "scaler", "scheduler", "step"),
)
_LIBRARY_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
_LIBRARY_EXTRAS = ("amp_scaler", "metric", "version")


def file_of(source: TeacherSource) -> Path:
    """The path of a source that has been checked."""
    assert source.path is not None
    return Path(source.path)


def named(path: Path, layout: str) -> str:
    """What messages call a file."""
    return f"{layout} checkpoint {str(path)!r}"


def unwrap(
    state: Mapping[str, Any], wrapper: str, source: str, extras: Collection[str] = ()
) -> Mapping[str, Any]:
    """The weights within a checkpoint, which may also hold them without a wrapper.

    Args:
        state: the checkpoint.
        wrapper: name of the entry with the weights.
        source: what messages call the file.
        extras: entries besides a solver's state that the layout is known to have.

    Raises:
        UserError: an entry that is neither, or no weights.
    """
    if wrapper in state:
        strange = [k for k in state if k != wrapper and k not in _SOLVER and k not in extras]
        if strange:
            found = ", ".join(map(str, strange[:3]))
            raise UserError(
                f"{source} does not fit its layout (unexpected: {found}); "
                f"beside {wrapper} it may hold {', '.join([*_SOLVER, *extras])}"
            )
        state = state[wrapper]
    if not isinstance(state, Mapping) or not state:
        raise UserError(f"{source} holds no weights in {wrapper!r}")
    strange = [k for k, v in state.items() if not isinstance(k, str) or not holds_values(v)]
    if strange:
        found = ", ".join(map(str, strange[:3]))
        raise UserError(
            f"{source} does not fit its layout (unexpected: {found}); "
            f"it holds weights by key, by themselves or in {wrapper!r}"
        )
    return state


def strip_parallel(weights: Mapping[str, Tensor], source: str) -> tuple[str, dict[str, Tensor]]:
    """Takes one leading ``module.`` off the keys, which DistributedDataParallel puts there.

    Returns:
        What was taken off, and the weights.

    Raises:
        UserError: some keys have it and others have not.
    """
    wrapped = [k for k in weights if k.startswith(_PARALLEL)]
    if not wrapped:
        return "", dict(weights)
    if len(wrapped) < len(weights):
        bare = [k for k in weights if not k.startswith(_PARALLEL)]
        odd, does = (bare, "do") if len(bare) < len(wrapped) else (wrapped, "do not")
        raise UserError(
            f"{source} does not fit its layout (unexpected: {', '.join(odd[:3])}); "
            f"the other keys {does} start with {_PARALLEL!r}"
        )
    return _PARALLEL, {k.removeprefix(_PARALLEL): v for k, v in weights.items()}


def refuse_rest(weights: Mapping[str, Tensor], prefix: str, source: str, allowed: str) -> None:
    """Refuses weights that no part of the layout has taken.

    Args:
        weights: what is left.
        prefix: that was taken off their keys.
        source: what messages call the file.
        allowed: what the layout holds.

    Raises:
        UserError: there are some.
    """
    if weights:
        keys = ", ".join(prefix + k for k in list(weights)[:3])
        raise UserError(
            f"{source} does not fit its layout (unexpected: {keys}); allowed: {allowed}"
        )


def image_side(kwargs: Mapping[str, Any], default: int = 224) -> int:
    """Side of the images that a model takes: what its arguments say, else ``default``."""
    side = kwargs.get("img_size", kwargs.get("image_size", default))
    return int(side[0] if isinstance(side, list | tuple) else side)


def take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Moves the weights with a prefix out of a state dict, without it."""
    found = [k for k in weights if k.startswith(prefix)]
    return {k.removeprefix(prefix): weights.pop(k) for k in found}


def load_backbone(
    name: str,
    kwargs: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    source: str,
    prefix: str,
) -> nn.Module:
    """Builds an architecture and gives it weights that are exactly its own.

    Args:
        name: as :func:`build_architecture` takes it.
        kwargs: arguments of its constructor.
        weights: by key.
        source: what messages call the file.
        prefix: of the keys in the file.

    Raises:
        UserError: unknown architecture, or weights of another one.
    """
    network = build_architecture(name, kwargs)
    check_fit(
        network,
        weights,
        source,
        f"the architecture {name!r}",
        f"if it is another one, name it by {KEY}.model",
        prefix,
    )
    network.load_state_dict(weights)
    return network


def prototype_rows(
    weights: Mapping[str, Tensor], prefix: str, source: str
) -> tuple[Tensor | None, str]:
    """The prototypes of a last layer, plain or weight-normed, and their key in the file.

    Weight norm's direction is returned: its length is no part of unit rows.

    Args:
        weights: of the layer.
        prefix: of its keys in the file.
        source: what messages call the file.

    Raises:
        UserError: other weights, or lengths that are not one per row.
    """
    if not weights:
        return None, ""
    for length, direction in (
        ("weight_g", "weight_v"),
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ):
        if weights.keys() == {length, direction}:
            rows = weights[direction]
            if weights[length].shape != (*rows.shape[:1], 1):
                raise UserError(
                    f"{source} does not fit (of another shape: {prefix}{length} "
                    f"{tuple(weights[length].shape)} for {prefix}{direction} {tuple(rows.shape)})"
                )
            return rows, prefix + direction
    if weights.keys() == {"weight"}:
        return weights["weight"], prefix + "weight"
    found = ", ".join(prefix + k for k in list(weights)[:3])
    raise UserError(
        f"{source} does not fit (unexpected: {found}); prototypes are {prefix}weight alone, "
        "or weight_g and weight_v, or parametrizations.weight.original0 and original1"
    )


def read_library_weights(path: Path, source: str) -> tuple[dict[str, Tensor], str, str]:
    """Reads weights of timm or torchvision, out of a training checkpoint too.

    Args:
        path: the file: safetensors, or of ``torch.save``.
        source: what messages call it.

    Returns:
        The weights, the prefix that was taken off their keys, and what to say of them.

    Raises:
        UserError: it cannot be read, or holds anything else.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path), "", ""
    state = read_checkpoint(path, (argparse.Namespace,))
    # Averaged ones first, as the libraries themselves take them.
    wrapper = next((w for w in _LIBRARY_WRAPPERS if state.get(w) is not None), "state_dict")
    weights = unwrap(state, wrapper, source, (*_LIBRARY_WRAPPERS, *_LIBRARY_EXTRAS))
    prefix, stripped = strip_parallel(weights, source)
    return stripped, prefix, "averaged weights" if wrapper.endswith("_ema") else ""


def check_library_fit(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    classifiers: Collection[str],
    source: str,
    model: str,
    prefix: str,
) -> dict[str, Tensor]:
    """The weights without those of the classifier, which are exactly those of the network.

    Args:
        network: without classifier.
        weights: by key.
        classifiers: names of the linear layers that the network lacks.
        source: what messages call the file.
        model: the architecture.
        prefix: that was taken off the keys.

    Raises:
        UserError: naming the first keys that are missing, unexpected or of another shape.
    """
    dropped = {f"{name}.{field}" for name in classifiers for field in ("weight", "bias")}
    kept = {k: v for k, v in weights.items() if k not in dropped}
    check_fit(
        network,
        kept,
        source,
        f"the model {model!r} without classifier",
        f"is it the file of another {KEY}.model?",
        prefix,
    )
    return kept
