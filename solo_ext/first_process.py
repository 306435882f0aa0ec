"""Which of a run's processes is the first, before they know each other."""

from __future__ import annotations

import os

_NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
)


def is_first_process() -> bool:
    """Whether launchers (torchrun, SLURM, Lightning) number this process 0 wherever they do.

    All numbers are looked at: Lightning's children keep that which SLURM gave their parent.
    """
    return not any(int(os.environ.get(name) or 0) for name in _NUMBERS)
