"""Where the runs of a benchmark are started."""

from solo_ext.lab.experiments.launchers.base import Launcher, Outcome
from solo_ext.lab.experiments.launchers.local import LocalLauncher
from solo_ext.lab.experiments.launchers.slurm import SlurmLauncher

__all__ = ["Launcher", "LocalLauncher", "Outcome", "SlurmLauncher"]
