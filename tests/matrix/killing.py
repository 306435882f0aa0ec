"""Runs that are killed at random moments of their life."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from solo_ext.lab.training.run_dir import checkpoints
from tests import forks
from tests.lab.training.same_run import assert_same_run

MOST = 4
LIVES = 5
"""Of a run that ends before all its kills are done."""


TRAIN = """
import json, sys
from pathlib import Path
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
config, run_dir = map(Path, sys.argv[1:])
pretrain(prepare(json.loads(config.read_text())), run_dir=run_dir, show_progress=False)
"""


class Runs:
    """Starts a config's runs and kills them."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config, self.said = folder / "config.json", ""
        self.config.write_text(json.dumps(config))

    def run(self, run_dir: Path, seconds: float | None = None) -> tuple[float, int]:
        """Starts a process on a run, and kills it after some seconds unless it ends before.

        Returns how long it lived, and its exit code, -9 for a killed one.
        """
        fork, begin = forks.start("-c", TRAIN, self.config, run_dir), time.monotonic()
        if fork.runs_for(seconds):
            fork.kill()
        lived = time.monotonic() - begin
        _, self.said = fork.communicate()
        return lived, fork.wait()

    def kill_at_random(self, whole: Path, parts: Path, kills: int, reach: float) -> str:
        """Trains one run in one life, and another that is killed so many times; a line to show.

        A kill comes at any moment of its process's life, its start among them: after a time drawn
        between zero and what makes all parts together get through a share ``reach`` of a life, if
        no step were repeated. A run that ends before all kills are done is compared and begun
        anew. Where none of the kills got past a checkpoint there are as many again, with half as
        much time more.
        """
        life, code = self.run(whole)
        assert code == 0, self.said[-2000:]
        start, code = self.run(whole)
        assert code == 0, self.said[-2000:]
        each = reach * max(0.0, life - start) / kills
        longest = start + each + math.sqrt(each * (each + 2 * start))
        # Not the global generator, which runs of this process have seeded.
        seed = random.SystemRandom().randrange(2**32)
        draw = random.Random(seed)
        steps = before = trained = number = starting = 0
        lives = 1
        while number < kills or (not trained and number < MOST * kills):
            if number and number % kills == 0:
                longest *= 1.5
            lived, code = self.run(parts, draw.uniform(0, longest))
            if code == 0 and lives < LIVES:
                assert_same_run(whole, parts)
                shutil.rmtree(parts)
                lives, before = lives + 1, 0
                continue
            assert code == -9, (
                f"{code} after {number} kills, {lived:.1f} s into a part\n{self.said[-2000:]}"
            )
            number += 1
            starting += lived < start
            held = checkpoints(parts)
            steps = int(torch.load(held[-1].path, weights_only=True)["global_step"]) if held else 0
            assert steps >= before, "a kill cost what was saved"
            trained += steps > before
            before = steps
        assert trained > 0, f"none of {number} parts went past a checkpoint"
        assert self.run(parts)[1] == 0, self.said[-2000:]
        return (
            f"a life of {life:.1f} s, {start:.1f} s of them to start; moments drawn from seed "
            f"{seed}; {trained} of {number} kills past a new checkpoint, {starting} in the time of "
            f"a start, the last at optimiser step {steps} of life {lives}"
        )
