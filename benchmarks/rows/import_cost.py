"""What importing and registering the plugin adds to importing solo-learn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.record import Effort, Finding, Measured, at_most

ROUNDS = 5

# Everything that solo-learn itself would import is imported before the plugin's time starts. 1.0.2
# cannot be imported without the host layer: loading it counts as solo-learn's there, importing the
# layer as the plugin's.
PROGRAM = """
import importlib.util, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
folder = Path(importlib.util.find_spec("solo").origin).parent
begin = time.perf_counter()
import hydra, omegaconf
own = 0.0
if (folder / "backbones").is_dir():
    import solo.methods, solo.losses, solo.data.pretrain_dataloader
    import solo.data.classification_dataloader
else:
    import lightning.pytorch, torchvision
    start = time.perf_counter()
    import solo_ext.host as host
    own = time.perf_counter() - start
    host.load()
start = time.perf_counter()
import solo_ext
solo_ext.register()
end = time.perf_counter()
print(start - begin - own, end - start + own)
"""


def seconds() -> tuple[float, float]:
    """Seconds of importing solo-learn, and of the plugin after it, in a fresh process."""
    program = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    return float(out[-2]), float(out[-1])


def help_seconds() -> float:
    """Seconds of one ``solo-ext --help``, the start of Python included."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "solo_ext.lab.cli.main", "--help"]
    subprocess.run(program, check=True, capture_output=True)
    return time.perf_counter() - start


def measure(effort: Effort) -> Measured:
    """Fresh processes, one after the other."""
    plugin, hosts, shown = [], [], []
    for _ in range(min(ROUNDS, effort.rounds)):
        loaded, cost = seconds()
        hosts.append(loaded)
        plugin.append(cost)
        shown.append(help_seconds())
    added = statistics.median(plugin)
    details: dict[str, Any] = {"plugin": plugin, "host": hosts, "help": shown}
    share = 100 * added / statistics.median(hosts)
    peer: Any = {"peer": "solo-learn's import"}
    note = f"slowest {1e3 * max(plugin):.0f} ms"
    return Measured(
        [
            Finding("import and registration", at_most(100, "ms"), 1e3 * added, note=note),
            Finding("import and registration, share", at_most(5, "%"), share, **peer),
            Finding("solo-ext --help", at_most(1000, "ms"), 1e3 * statistics.median(shown)),
        ],
        details,
    )
