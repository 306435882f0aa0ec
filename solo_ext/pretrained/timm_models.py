"""Any timm model as a teacher, with its own weights or those of a local file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_model_data_config  # type: ignore[attr-defined]

from solo_ext.core.errors import ConfigError, UserError, nearest
from solo_ext.pretrained.architectures import building, timm_name
from solo_ext.pretrained.files import file_digest, state_digest
from solo_ext.pretrained.layouts import check_library_fit, image_side, named, read_library_weights
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.teacher_source import KEY, TeacherSource


def load_timm(source: TeacherSource) -> LoadedTeacher:
    """Loads a timm model without its classifier; mean, deviation and size are its own config's.

    ``path`` is a file of weights as timm keeps them (safetensors or ``torch.save``); without it
    timm fetches those of the tag, or of its default tag.

    Raises:
        UserError: unknown model or tag, weights that cannot be fetched, or of another model.
    """
    assert source.model is not None
    model = _known(source.model)
    if source.path is not None:
        path = Path(source.path)
        title, digest = named(path, "timm"), file_digest(path)
        network, note = _from_file(model, source, path, title)
    else:
        title, note = "timm", ""
        network = _fetched(model, source)
        digest = state_digest(network.state_dict())
    config = resolve_model_data_config(network)  # type: ignore[no-untyped-call]
    tag = network.pretrained_cfg.get("tag")
    bare = model.partition(".")[0]
    return assemble(
        network,
        Projection(),
        name=f"{bare}.{tag} of {title}" if tag and not source.path else f"{bare} of {title}",
        digest=digest,
        mean=config["mean"],
        std=config["std"],
        input_size=image_side(source.model_kwargs, config["input_size"][-1]),
        notes=[note] if note else [],
    )


def _known(name: str) -> str:
    bare = timm_name(name if name.startswith("timm/") else f"timm/{name}")
    architecture, _, tag = bare.partition(".")
    tags = [m.partition(".")[2] for m in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise ConfigError(f"{KEY}.model", name, f"timm has no weights {tag!r}", nearest(tag, tags))
    return bare


def _from_file(model: str, source: TeacherSource, path: Path, title: str) -> tuple[Any, str]:
    with building(model, source.model_kwargs):
        network: Any = timm.create_model(model, **{"num_classes": 0, **source.model_kwargs})
    classifiers = network.pretrained_cfg.get("classifier") or ()
    if isinstance(classifiers, str):
        classifiers = (classifiers,)
    weights, prefix, note = read_library_weights(path, title)
    kept = check_library_fit(network, weights, classifiers, title, model, prefix)
    network.load_state_dict(kept)
    return network, note


def _fetched(model: str, source: TeacherSource) -> Any:
    try:
        with building(model, source.model_kwargs):
            # With its classifier, for without it timm does not insist on every key.
            network: Any = timm.create_model(model, pretrained=True, **source.model_kwargs)
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"timm cannot get the weights of {model!r}: {reason}; fetch them where there is a "
            f"network and name the file by {KEY}.path"
        ) from error
    network.reset_classifier(0)
    return network
