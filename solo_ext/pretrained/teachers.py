"""One loader for every teacher: runs, published checkpoints, and the models of two libraries."""

from __future__ import annotations

import importlib

from solo_ext.pretrained.loaded_teacher import LoadedTeacher
from solo_ext.pretrained.teacher_source import TeacherSource, check_source

__all__ = ["LoadedTeacher", "TeacherSource", "check_source", "load_teacher"]

_MODULES = {
    "dino": "dino",
    "moco_v2": "moco_v2",
    "run": "run_teacher",
    "swav": "swav",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
}
"""Each has ``load_<layout>``; imported when a teacher is, not with the methods' registration."""


def load_teacher(source: TeacherSource) -> LoadedTeacher:
    """Loads a teacher onto the CPU and proves it by shapes and a forward pass.

    Files are read without running code in them; keys must be exactly those of the architecture,
    the head and the prototypes, besides what the layout is known to carry along.

    Raises:
        UserError: there is no such file, or it is not what the source says; one line that names
            the first keys at fault.
    """
    check_source(source)
    module = importlib.import_module(f"solo_ext.pretrained.{_MODULES[source.layout]}")
    loaded: LoadedTeacher = getattr(module, f"load_{source.layout}")(source)
    return loaded
