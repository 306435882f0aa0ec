"""A run of PCL that is killed at a hundred moments of its life."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from solo_ext.training.run_dir import checkpoints
from tests.training.same_run import assert_same_run

pytestmark = pytest.mark.matrix
KILLS = 100


class Server:
    """Starts runs and kills them; see ``fork_server.py``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, run_dir: Path, seconds: float | None = None) -> tuple[float, int]:
        """Starts a process on a run, and kills it after some seconds unless it ends before.

        Returns:
            How long it lived, and its exit code, -9 for a killed one.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{run_dir}\n")
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        ended, *_ = select.select([self.process.stdout], [], [], seconds)
        if not ended:
            os.kill(child, signal.SIGKILL)
        return time.monotonic() - begin, int(self.process.stdout.readline())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
@pytest.mark.timeout(3600)
def test_it_ends_as_if_nobody_had(server: Server, tmp_path: Path) -> None:
    """Same weights, same optimiser, same queue and prototypes, same log, to the last bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    life, code = server.run(whole)
    assert code == 0
    start, _ = server.run(whole)
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    print(f"moments drawn from seed {seed}; a life of {life:.1f} s, {start:.1f} s of them to start")
    steps = before = 0
    for number in range(KILLS):
        # Its start too is a part of its life.
        lived, code = server.run(parts, draw.uniform(0, 2 * (start + (life - start) / KILLS)))
        assert code == -9, f"{code} after {number} kills, {lived:.1f} s into a part"
        held = checkpoints(parts)
        steps = int(torch.load(held[-1].path, weights_only=True)["global_step"]) if held else 0
        assert steps >= before, "a kill cost what was saved"
        before = steps
    print(f"at optimiser step {steps} after {KILLS} kills")
    assert steps
    assert server.run(parts)[1] == 0
    assert_same_run(whole, parts)
    assert not list(parts.glob("*.unreadable"))
