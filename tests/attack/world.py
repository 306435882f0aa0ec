"""A user's folders, what happens in them, and what must hold after every command."""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from PIL import Image

from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests.lab.training.same_run import assert_same, logged

HANG = 90
"""Seconds after which a command counts as one that hangs; an undisturbed one takes two."""
DOCUMENTED = {0, 1, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}
"""Exit codes of the command line."""
SIDE = 16


class Said(NamedTuple):
    """Of a command that has ended.

    Attributes:
        code: its exit code, negative for a signal that it did not answer.
        text: what it printed.
        seconds: how long it took.
    """

    code: int
    text: str
    seconds: float


class Server:
    """Runs command lines as forks of a process that has imported everything."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("command_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        words: Sequence[object],
        cwd: Path,
        said: Path,
        number: int | None = None,
        after: float = 0.0,
    ) -> Said:
        """Runs a command, and sends it a signal after some seconds if it still runs then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        said.unlink(missing_ok=True)
        request = {"words": [str(word) for word in words], "cwd": str(cwd), "said": str(said)}
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        if number is not None and not self._ended(after):
            # The whole session, as a terminal does for Ctrl-C and a scheduler that ends a job.
            target = os.killpg if number in (signal.SIGINT, signal.SIGKILL) else os.kill
            target(child, number)
        hangs = not self._ended(HANG)
        if hangs:
            os.killpg(child, signal.SIGKILL)
        code, seconds = int(self.process.stdout.readline()), time.monotonic() - begin
        text = said.read_text(errors="replace") if said.exists() else ""
        assert not hangs, f"{words} hangs\n{text[-3000:]}"
        assert_alone(child)
        return Said(code, text, seconds)

    def _ended(self, seconds: float) -> bool:
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def close(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait()


def assert_alone(session: int) -> None:
    """No process of a command that has ended is left, not even a worker of a killed one."""
    deadline = time.monotonic() + 15
    while left := _of_session(session):
        assert time.monotonic() < deadline, f"processes are left behind: {left}"
        time.sleep(0.1)


def _of_session(session: int) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, held = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (place / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if int(held) == session and state != "Z":
            found.append(f"{place.name} {command[:200]}")
    return found


def made_images(folder: Path) -> Path:
    """Class folders of 16 random images each."""
    rng = np.random.default_rng(0)
    for label in range(3):
        (folder / str(label)).mkdir(parents=True)
        for number in range(16):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


def settings(images: Path, method: str, **changes: Any) -> dict[str, Any]:
    """A run of four epochs of two steps of a tiny network."""
    kwargs: dict[str, Any] = {
        "debiased": {},
        "pcl": {"queue_size": 48, "num_prototypes": [3, 6], "warmup_epochs": 1},
        "mochi": {"queue_size": 48, "mixing": {"num_hard": 12, "num_pair_mixes": 8}},
        "byol": {"pred_hidden_dim": 16},
    }
    return {
        "name": "tiny",
        "method": method,
        "backbone": {
            "name": "timm/resnet10t",
            "kwargs": {"channels": [8, 8, 8, 8], "small_stem": False},
        },
        "method_kwargs": {"proj_hidden_dim": 16, "proj_output_dim": 8, **kwargs[method]},
        "data": {
            "dataset": "custom",
            "train_path": str(images),
            "val_path": str(images),
            "num_workers": 0,
        },
        "augmentations": [{"crop_size": SIDE, "num_crops": 2}],
        "optimizer": {"name": "sgd", "batch_size": 24, "lr": 0.3, "classifier_lr": 0.1},
        "scheduler": {"name": "none"},
        "checkpoint": {"every_n_steps": 1},
        "accelerator": "cpu",
        "max_epochs": 4,
        "enable_progress_bar": False,
        **changes,
    }


RUNS: dict[str, dict[str, Any]] = {
    "debiased": {},
    "pcl": {},
    "mochi": {"checkpoint": {"every_n_steps": 0}},
    "byol": {"loggers": ["csv"], "online_eval": {"every_n_epochs": 2}},
}
"""Runs that a sequence may begin with: method, and what differs in its config."""


def fingerprint(folder: Path) -> str:
    """Changes with every name, link, size and content below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


class World:
    """One sequence: a run, everything that happens to it, and what is known of it.

    Args:
        folder: empty.
        server: runs the commands.
        undisturbed: the same runs, left alone; made once, and shared by all sequences.
        method: of :data:`RUNS`.
    """

    def __init__(self, folder: Path, server: Server, undisturbed: Path, method: str) -> None:
        self.folder, self.server = folder, server
        self.cwd, self.runs, self.strange = (folder / n for n in ("cwd", "runs", "elsewhere"))
        for made in (self.cwd, self.runs, self.strange, folder / "configs"):
            made.mkdir()
        (self.strange / "thesis.txt").write_text("all of it\n")
        self.images = made_images(folder / "images")
        self.method, self.run = method, self.runs / "run"
        config = settings(self.images, method, **RUNS[method])
        (folder / "configs" / "run.yaml").write_text(yaml.safe_dump(config))
        self.undisturbed = undisturbed / method
        self.trusted_log = True
        self.history: list[str] = []

    def whole(self) -> tuple[Path, float]:
        """The undisturbed run, and the seconds it took; begun from images of the same content."""
        timing = self.undisturbed.with_suffix(".seconds")
        if not timing.exists():
            said = self.command("pretrain", *self.begin(self.undisturbed))
            assert said.code == 0, said.text
            timing.write_text(str(said.seconds))
        return self.undisturbed, float(timing.read_text())

    def begin(self, run_dir: Path) -> list[str]:
        """The words that begin the run in a directory."""
        return [
            f"--config-path={self.folder / 'configs'}",
            "--config-name=run",
            f"--run-dir={run_dir}",
        ]

    def command(
        self, *words: object, number: int | None = None, after: float = 0.0, fails: bool = False
    ) -> Said:
        """Runs a command and holds what must be true of every one.

        Args:
            words: the command line.
            number: a signal that it gets.
            after: seconds until then.
            fails: whether it must not succeed.
        """
        before = {name: fingerprint(getattr(self, name)) for name in ("strange", "images", "cwd")}
        said = self.server.run(words, self.cwd, self.folder / "said.txt", number, after)
        shown = " ".join(map(str, words)) + (
            f" [signal {number} after {after:.2f} s]" if number else ""
        )
        self.history.append(f"{shown} -> {said.code}")
        told = "\n".join([*self.history, said.text[-4000:]])
        assert "Traceback (most recent call last)" not in said.text, told
        killed = number == signal.SIGKILL and said.code == -signal.SIGKILL
        assert killed or said.code in DOCUMENTED, told
        if said.code and not killed:
            lines = [line for line in said.text.splitlines() if line.strip()]
            assert lines, f"nothing is said\n{told}"
            assert lines[-1].startswith("solo-ext"), f"no line of its own at the end\n{told}"
        assert not (fails and said.code == 0), told
        for name, held in before.items():
            assert fingerprint(getattr(self, name)) == held, f"{name} was changed\n{told}"
        return said

    def check_finished(self) -> None:
        """A run that ended by itself is the undisturbed one, to the last bit."""
        whole, _ = self.whole()
        told = "\n".join(self.history)
        one, two = checkpoints(whole), checkpoints(self.run)
        assert len(one) == len(two) == 1, f"{two}\n{told}"
        a, b = (torch.load(c[0].path, weights_only=True) for c in (one, two))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            assert_same(a[part], b[part], f"{part}\n{told}\n")
        if self.trusted_log and METRICS in {file.name for file in self.run.iterdir()}:
            assert_same(logged(whole), logged(self.run), f"{METRICS}\n{told}\n")

    def files(self) -> list[Path]:
        """Files of the run directory, logs and records of evaluations among them."""
        if not self.run.is_dir():
            return []
        return sorted(p for p in self.run.rglob("*") if p.is_file() or p.is_symlink())

    def damage(self, place: int, how: str, seed: int) -> None:
        """Does something to one file of the run directory."""
        held = self.files()
        if not held:
            return
        file, draw = held[place % len(held)], random.Random(seed)
        self.history.append(f"{how} {file.relative_to(self.run)}")
        if file.suffix != ".ckpt":
            self.trusted_log = False
        size = file.stat().st_size if file.exists() else 0
        if how == "truncate":
            os.truncate(file, draw.randrange(size + 1))
        elif how == "flip" and size:
            content = bytearray(file.read_bytes())
            content[draw.randrange(size)] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        elif how == "append":
            with file.open("ab") as end:
                end.write(draw.randbytes(draw.randrange(1, 200)))
        elif how in ("delete", "folder", "pipe", "link", "endless"):
            file.unlink()
            if how == "folder":
                file.mkdir()
            elif how == "pipe":
                os.mkfifo(file)
            elif how == "link":
                file.symlink_to(self.strange / "thesis.txt")
            elif how == "endless":
                file.symlink_to("/dev/zero")

    def move(self) -> None:
        """Gives the run directory another name."""
        if self.run.is_dir():
            target = self.runs / f"moved-{len(self.history)}"
            shutil.move(self.run, target)
            self.run = target
            self.history.append(f"moved to {target.name}")


DAMAGES = ("truncate", "flip", "append", "delete", "folder", "pipe", "link", "endless")
