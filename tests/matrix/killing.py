"""Runs that are killed at random moments of their life."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from solo_ext.training.run_dir import checkpoints


class Server:
    """Starts a config's runs and kills them; see ``fork_server.py``.

    Args:
        folder: for the config, and for what the runs say.
        config: of the runs.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config, self.said = folder / "config.json", folder / "said.txt"
        self.config.write_text(json.dumps(config))
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
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
        line = {"config": str(self.config), "run_dir": str(run_dir)}
        self.process.stdin.write(f"{json.dumps(line)}\n")
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        ended, *_ = select.select([self.process.stdout], [], [], seconds)
        if not ended:
            os.kill(child, signal.SIGKILL)
        return time.monotonic() - begin, int(self.process.stdout.readline())

    def kill_at_random(self, whole: Path, parts: Path, kills: int) -> tuple[int, str]:
        """Trains one run in one life, and another that is killed so many times before it may end.

        Returns:
            The optimiser steps that the second run had done when left alone, and a line to show.
        """
        life, code = self.run(whole)
        assert code == 0, self.said.read_text()[-2000:]
        start, _ = self.run(whole)
        seed = random.randrange(2**32)
        draw = random.Random(seed)
        steps = before = 0
        for number in range(kills):
            # Its start too is a part of its life.
            lived, code = self.run(parts, draw.uniform(0, start + 2 * (life - start) / kills))
            assert code == -9, (
                f"{code} after {number} kills, {lived:.1f} s into a part\n"
                f"{self.said.read_text()[-2000:]}"
            )
            held = checkpoints(parts)
            steps = int(torch.load(held[-1].path, weights_only=True)["global_step"]) if held else 0
            assert steps >= before, "a kill cost what was saved"
            before = steps
        assert self.run(parts)[1] == 0, self.said.read_text()[-2000:]
        return steps, (
            f"a life of {life:.1f} s, {start:.1f} s of them to start; moments drawn from seed "
            f"{seed}; at optimiser step {steps} after {kills} kills"
        )

    def close(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait()
