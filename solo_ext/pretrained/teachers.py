"""One loader for every teacher: runs, published checkpoints, and the models of two libraries."""

from __future__ import annotations

from collections.abc import Callable

from solo_ext.pretrained.dino import load_dino
from solo_ext.pretrained.loaded_teacher import LoadedTeacher
from solo_ext.pretrained.moco_v2 import load_moco_v2
from solo_ext.pretrained.run_teacher import load_run
from solo_ext.pretrained.swav import load_swav
from solo_ext.pretrained.teacher_source import TeacherSource, check_source
from solo_ext.pretrained.timm_models import load_timm
from solo_ext.pretrained.torchvision_models import load_torchvision

__all__ = ["LoadedTeacher", "TeacherSource", "check_source", "load_teacher"]

_LOADERS: dict[str, Callable[[TeacherSource], LoadedTeacher]] = {
    "dino": load_dino,
    "moco_v2": load_moco_v2,
    "run": load_run,
    "swav": load_swav,
    "timm": load_timm,
    "torchvision": load_torchvision,
}


def load_teacher(source: TeacherSource) -> LoadedTeacher:
    """Loads a teacher onto the CPU and proves it by shapes and a forward pass.

    Files are read without running code in them; keys must be exactly those of the architecture,
    the head and the prototypes, besides what the layout is known to carry along.

    Raises:
        UserError: there is no such file, or it is not what the source says; one line that names
            the first keys at fault.
    """
    check_source(source)
    return _LOADERS[source.layout](source)
