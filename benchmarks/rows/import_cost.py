"""What importing and registering the plugin adds to importing solo-learn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

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


def python(*words: str) -> str:
    """What a fresh process prints."""
    words = sys.executable, *words
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def measure(effort: Effort) -> Measured:
    """Fresh processes, one after the other."""
    details: dict[str, list[float]] = {"plugin": [], "host": [], "help": []}
    for _ in range(min(ROUNDS, effort.rounds)):
        *_, loaded, cost = python("-c", PROGRAM).split()
        details["host"].append(float(loaded))
        details["plugin"].append(float(cost))
        # The start of Python included.
        start = time.perf_counter()
        python("-m", "solo_ext.lab.cli.main", "--help")
        details["help"].append(time.perf_counter() - start)
    added, host, shown = (statistics.median(details[name]) for name in ("plugin", "host", "help"))
    note = f"slowest {1e3 * max(details['plugin']):.0f} ms"
    share, peer = 100 * added / host, "solo-learn's import"
    return Measured(
        [
            Finding("import and registration", at_most(100, "ms"), 1e3 * added, note=note),
            Finding("import and registration, share", at_most(5, "%"), share, peer=peer),
            Finding("solo-ext --help", at_most(1000, "ms"), 1e3 * shown),
        ],
        details,
    )
