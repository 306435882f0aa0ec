"""What importing and registering the plugin adds to importing solo-learn.

Interleaves fresh processes with and without the plugin (A/B) and two without (A/A), and prints the
medians. Target: at most 100 ms beyond solo-learn, and `solo-ext --help` within a second.

    uv run python benchmarks/import_cost.py [--pairs 7] [--json FILE]
    PYTHONPATH=/path/to/solo-learn uv run python benchmarks/import_cost.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

# 1.0.2 cannot be imported without the host layer: both programs load it, and the second one
# registers. Everything that solo-learn itself would import is imported before the clock starts.
HOST = """
import time, warnings
warnings.simplefilter("ignore")
from solo_ext.host import detect
generation = detect().generation
if generation == "main":
    import solo.methods, solo.losses, solo.data.pretrain_dataloader
    import solo.data.classification_dataloader
else:
    import solo_ext.host as host
    host.load()
import hydra
start = time.perf_counter()
{body}
print(generation, time.perf_counter() - start)
"""
REGISTER = "import solo_ext\nsolo_ext.register()"


def seconds_of(body: str) -> tuple[str, float]:
    """Seconds that ``body`` takes in a fresh process where solo-learn is imported."""
    program = [sys.executable, "-c", HOST.format(body=body)]
    out = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    return out[-2], float(out[-1])


def help_seconds() -> float:
    """Seconds of one `solo-ext --help`, the start of Python included."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "solo_ext.cli.main", "--help"]
    subprocess.run(program, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nothing: list[float] = []
    plugin: list[float] = []
    shown: list[float] = []
    generation = ""
    for _ in range(args.pairs):
        nothing.append(seconds_of("pass")[1])
        generation, cost = seconds_of(REGISTER)
        plugin.append(cost)
        shown.append(help_seconds())
    record = {
        "generation": generation,
        "pairs": args.pairs,
        "nothing_ms": round(1000 * statistics.median(nothing), 3),
        "import_and_register_ms": round(1000 * statistics.median(plugin), 1),
        "import_and_register_ms_max": round(1000 * max(plugin), 1),
        "help_ms": round(1000 * statistics.median(shown), 1),
    }
    for key, value in record.items():
        print(f"{key:<28} {value}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
