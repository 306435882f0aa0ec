"""Scripts of tests, which begin processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_script(
    script: Path,
    folder: Path,
    *words: str,
    timeout: float = 400,
    environment: Mapping[str, str] | None = None,
    fails: bool = False,
) -> None:
    """Runs ``script folder *words`` within the folder, on one thread a process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder), *words],
        env={**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
    )
    assert (done.returncode != 0) is fails, done.stderr[-3000:]
