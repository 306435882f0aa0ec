"""Scripts of tests, which begin processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests import forks


def run_script(
    script: Path,
    folder: Path,
    *words: str,
    timeout: float = 400,
    environment: Mapping[str, str] | None = None,
    fails: bool = False,
) -> None:
    """Runs ``script folder *words`` within the folder, on one thread a process."""
    env = {**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"}
    given = ("-W", "ignore", script, folder, *words)
    done = forks.run(*given, cwd=folder, env=env, timeout=timeout)
    assert (done.returncode != 0) is fails, done.stderr[-3000:]
