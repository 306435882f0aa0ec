"""Teachers: from the settings of a config to a network that was loaded and tested."""

from __future__ import annotations

from pathlib import Path

from solo_ext.core.errors import ConfigError
from solo_ext.pretrained.layouts import load_dino, load_moco_v2, load_swav
from solo_ext.pretrained.libraries import load_timm, load_torchvision
from solo_ext.pretrained.loaded import KEY, LoadedTeacher, TeacherSource
from solo_ext.pretrained.runs import load_run

_META = "https://dl.fbaipublicfiles.com"
_PUBLISHED: dict[str, tuple[str, ...]] = {
    "moco_v2": (f"{_META}/moco/moco_checkpoints/moco_v2_800ep/moco_v2_800ep_pretrain.pth.tar",),
    "swav": (f"{_META}/deepcluster/swav_800ep_pretrain.pth.tar",),
    "dino": (
        f"{_META}/dino/dino_resnet50_pretrain/dino_resnet50_pretrain_full_checkpoint.pth",
        f"{_META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain_full_checkpoint.pth",
    ),
}
_LOADERS = {
    "run": load_run,
    "moco_v2": load_moco_v2,
    "swav": load_swav,
    "dino": load_dino,
    "timm": load_timm,
    "torchvision": load_torchvision,
}


def check_source(source: TeacherSource) -> None:
    """Refuses what can be recognised as wrong without reading the teacher.

    Raises:
        ConfigError: a setting is missing, names nothing that exists, or is not for this layout.

    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> check_source(TeacherKwargs(layout="timm"))
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: method_kwargs.teacher.model=null: layout timm needs a model...
    """
    layout, path = source.layout, source.path
    run, library = layout == "run", layout in ("timm", "torchvision")
    urls = " or ".join(_PUBLISHED.get(layout, ()))
    get = f"{f'download {urls} and ' if urls else ''}name it by {KEY}.path=..."
    kind = "a run directory or checkpoint" if run else "a file"
    example = f"for example resnet50{'.a1_in1k' if layout == 'timm' else ':IMAGENET1K_V2'}"
    told = "a run says itself what it is"
    for wrong, name, problem, remedy in (
        (path is None and not library, "path", f"layout {layout} needs {kind}", get),
        (path is not None and not Path(path).exists(), "path", "there is no such file", get),
        (run and source.model is not None, "model", told, "drop it"),
        (run and source.model_kwargs != {}, "model_kwargs", told, "drop it"),
        (not run and source.networks != "online", "networks", "only a run has two", "drop it"),
        (library and source.model is None, "model", f"layout {layout} needs a model", example),
    ):
        if wrong:
            raise ConfigError(f"{KEY}.{name}", getattr(source, name), problem, remedy)


def load_teacher(source: TeacherSource) -> LoadedTeacher:
    """Loads a teacher onto the CPU and tests its shapes and a forward pass.

    Files are read without running code in them. Keys must be exactly those of the architecture, the
    head and the prototypes, besides entries that the layout is known to have.

    Raises:
        UserError: there is no such file, or it is not what the source says; one line that names
            the first keys at fault.

    >>> import tempfile
    >>> import torch
    >>> from torchvision.models import shufflenet_v2_x0_5
    >>> file = tempfile.mkdtemp() + "/weights.pth"
    >>> torch.save(shufflenet_v2_x0_5().state_dict(), file)
    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> source = TeacherKwargs(layout="torchvision", path=file, model="shufflenet_v2_x0_5")
    >>> load_teacher(source).backbone(torch.randn(2, 3, 224, 224)).shape
    torch.Size([2, 1024])
    """
    check_source(source)
    return _LOADERS[source.layout](source)
