"""Where the runs of a benchmark are started."""

from solo_ext.benchmark.launchers.base import Launcher, Outcome
from solo_ext.benchmark.launchers.local import LocalLauncher
from solo_ext.benchmark.launchers.slurm import SlurmLauncher

__all__ = ["Launcher", "LocalLauncher", "Outcome", "SlurmLauncher"]
