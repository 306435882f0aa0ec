"""Runs that are killed at random moments of their life."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from solo_ext.training.run_dir import checkpoints
from tests.training.same_run import assert_same_run

LATE = 3


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

    def run(
        self, run_dir: Path, seconds: float | None = None, *, past_checkpoint: bool = False
    ) -> tuple[float, int]:
        """Starts a process on a run, and kills it after some seconds unless it ends before.

        Args:
            run_dir: of the run.
            seconds: until it is killed.
            past_checkpoint: count them from the first checkpoint that this process writes.

        Returns:
            How long it lived, and its exit code, -9 for a killed one.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = {"config": str(self.config), "run_dir": str(run_dir)}
        self.process.stdin.write(f"{json.dumps(line)}\n")
        held = set(checkpoints(run_dir))
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        ended: list[Any] = []
        while past_checkpoint and not ended and not set(checkpoints(run_dir)) - held:
            ended, *_ = select.select([self.process.stdout], [], [], 0.005)
        if not ended:
            ended, *_ = select.select([self.process.stdout], [], [], seconds)
        if not ended:
            os.kill(child, signal.SIGKILL)
        return time.monotonic() - begin, int(self.process.stdout.readline())

    def kill_at_random(
        self, whole: Path, parts: Path, kills: int, runs: int = 5, reach: float = 0.3
    ) -> str:
        """Trains one run in one life, and another that is killed so many times before it may end.

        Every third kill comes after the first checkpoint of its process, the others while it
        starts, which is most of a short run's life.

        Args:
            whole: run directory of the first.
            parts: of the other.
            kills: how many.
            runs: that may end before all kills are done, on a machine whose pace changes, and are
                begun anew, this one included.
            reach: how far the kills come on average, as a share of its life without start. What
                a part does until its first checkpoint is not counted.

        Returns:
            A line to show.
        """
        life, code = self.run(whole)
        assert code == 0, self.said.read_text()[-2000:]
        start, code = self.run(whole)
        assert code == 0, self.said.read_text()[-2000:]
        seed = random.randrange(2**32)
        draw = random.Random(seed)
        steps = before = trained = 0
        number = 0
        while number < kills:
            late = number % LATE == 0
            longest = 2 * LATE * reach * max(0.0, life - start) / kills if late else start
            lived, code = self.run(parts, draw.uniform(0, longest), past_checkpoint=late)
            if code == 0 and runs > 1:
                assert_same_run(whole, parts)
                shutil.rmtree(parts)
                runs, before = runs - 1, 0
                continue
            assert code == -9, (
                f"{code} after {number} kills, {lived:.1f} s into a part\n"
                f"{self.said.read_text()[-2000:]}"
            )
            number += 1
            held = checkpoints(parts)
            steps = int(torch.load(held[-1].path, weights_only=True)["global_step"]) if held else 0
            assert steps >= before, "a kill cost what was saved"
            trained += steps > before
            before = steps
        assert trained >= 3, f"only {trained} of {kills} parts went past a checkpoint"
        assert self.run(parts)[1] == 0, self.said.read_text()[-2000:]
        return (
            f"a life of {life:.1f} s, {start:.1f} s of them to start; moments drawn from seed "
            f"{seed}; {trained} of {kills} kills past a new checkpoint, the last at optimiser step "
            f"{steps}"
        )

    def close(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait()
