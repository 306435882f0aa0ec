"""A user's folders, what happens in them, and what must hold after every command."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from PIL import Image

from solo_ext import host
from solo_ext.core.files import append_lines
from solo_ext.lab.experiments.records import code_version
from solo_ext.lab.training.run_dir import ARGS, CONFIG, METRICS, checkpoints
from tests import forks
from tests.conftest import made_images, tiny_config
from tests.lab.training.same_run import assert_same, logged
from tests.mounts import fill

HANG = 90
"""Seconds after which a command counts as one that hangs; an undisturbed one takes two."""
DOCUMENTED = {0, 1, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}
"""Exit codes of the command line."""


DISTURBED = Path(__file__).with_name("disturbed.py")
OLDER = Path(__file__).with_name("older_version.tar.xz")
"""A run of ``debiased`` by this package as of 900 commits ago, killed after 5 of 8 steps."""
ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "attack"


class Outcomes:
    """How attacks have ended: in this process, and in this batch.

    Args:
        name: what is counted, which is the name of the record too.
        batch: how many make a line of the record.
        kept: whether there is a record.
    """

    def __init__(self, name: str, batch: int, kept: bool) -> None:
        self.name, self.batch, self.kept = name, batch, kept
        self.failures: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Starts a batch."""
        self.tried, self.since, self.told = 0, time.monotonic(), len(self.failures)
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, **counts: Iterable[str]) -> None:
        """Counts one that has ended."""
        self.tried += 1
        for name, more in counts.items():
            self.counts[name].update(more)
        if self.tried == self.batch:
            self.write()

    def write(self) -> None:
        """Ends a batch."""
        if self.kept and self.tried:
            about = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **code_version()}
            about |= {"host": host.load().info.generation, self.name: self.tried}
            about |= {"seconds": round(time.monotonic() - self.since), **self.counts}
            about |= {"failures": [without_places(x) for x in self.failures[self.told :]]}
            RECORDS.mkdir(parents=True, exist_ok=True)
            append_lines(RECORDS / f"{self.name}.jsonl", [about])
        self.begin()


def without_places(text: str) -> str:
    """The text without the folders of this machine.

    >>> without_places(f"pretrain {tempfile.gettempdir()}/tmp1x/runs/run")
    'pretrain .../runs/run'
    """
    folders = [re.escape(str(x)) for x in (ROOT, sys.prefix, sys.base_prefix)]
    return re.sub("|".join([*folders, rf"{tempfile.gettempdir()}(/\w+(?=/))?"]), "...", text)


class Disturbed(NamedTuple):
    """What a machine does to a command.

    Attributes:
        step: seconds that its clock steps.
        after: seconds until then.
        delay: seconds that each change of a file takes longer.
        locks: whether its file system has any.
    """

    step: float = 0.0
    after: float = 0.0
    delay: float = 0.0
    locks: int = 1


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


def run(
    words: Sequence[object],
    cwd: Path,
    number: int | None = None,
    after: float = 0.0,
    disturbed: Disturbed | None = None,
    env: Mapping[str, str] | None = None,
) -> Said:
    """Runs a command, and sends it a signal after some seconds if it still runs then."""
    program = forks.SOLO_EXT if disturbed is None else (DISTURBED, *disturbed)
    variables = None if env is None else {**os.environ, **env}
    fork, begin = forks.start(*program, *words, cwd=cwd, env=variables), time.monotonic()
    if number is not None and fork.runs_for(after):
        # The whole session, as a terminal does for Ctrl-C and a scheduler that ends a job.
        target = os.killpg if number in (signal.SIGINT, signal.SIGKILL) else os.kill
        target(fork.pid, number)
    hangs = fork.runs_for(HANG)
    if hangs:
        os.killpg(fork.pid, signal.SIGKILL)
    code, seconds = fork.wait(), time.monotonic() - begin
    assert_alone(fork.pid)
    text = "".join(fork.communicate())
    assert not hangs, f"{words} hangs\n{text[-3000:]}"
    return Said(code, text, seconds)


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


def settings(images: Path, method: str, **changes: Any) -> dict[str, Any]:
    """A run of four epochs of two steps of a tiny network."""
    data, checkpoint = {"val_path": str(images)}, {"every_n_steps": 1}
    config = tiny_config(images, method, data=data, checkpoint=checkpoint, max_epochs=4)
    return config | changes


RUNS: dict[str, dict[str, Any]] = {
    "debiased": {},
    "pcl": {},
    "mochi": {"checkpoint": {"every_n_steps": 0}},
    "byol": {"online_eval": {"every_n_epochs": 2}},
}
"""Runs that a sequence may begin with: method, and what differs in its config."""


def take_older(run: Path, images: Path) -> None:
    """Unpacks the run of an older version, of images like these."""
    with tarfile.open(OLDER) as archive:
        archive.extractall(run, filter="data")
    for name in (CONFIG, ARGS):
        file = run / name
        file.write_text(file.read_text().replace("/IMAGES", str(images)))


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
        undisturbed: the same runs, left alone; made once, and shared by all sequences.
        method: of :data:`RUNS`.
    """

    def __init__(self, folder: Path, undisturbed: Path, method: str) -> None:
        self.folder = folder
        self.cwd, self.runs, self.strange = (folder / n for n in ("cwd", "runs", "elsewhere"))
        for made in (self.cwd, self.runs, self.strange, folder / "configs"):
            made.mkdir(exist_ok=True)
        (self.strange / "thesis.txt").write_text("all of it\n")
        self.images = made_images(folder / "images")
        self.method, self.run = method, self.runs / "run"
        config = settings(self.images, method, **RUNS[method])
        (folder / "configs" / "run.yaml").write_text(yaml.safe_dump(config))
        self.undisturbed = undisturbed / method
        self.as_begun = self.trusted_log = True
        self.history: list[str] = []
        self.commands: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()

    def whole(self) -> tuple[Path, float]:
        """The undisturbed run, and the seconds it took; begun from images of the same content."""
        timing = self.undisturbed.with_suffix(".seconds")
        if not timing.exists():
            said = self.command("pretrain", *self.begin(self.undisturbed))
            assert said.code == 0, said.text
            self.history.clear()
            timing.write_text(str(said.seconds))
        return self.undisturbed, float(timing.read_text())

    def begin(self, run_dir: Path) -> list[str]:
        """The words that begin the run in a directory."""
        return [
            f"--config-path={self.folder / 'configs'}",
            "--config-name=run",
            f"--run-dir={run_dir}",
        ]

    def words_to_train(self, anew: bool, workers: int = 0) -> list[str]:
        """``--resume``; or those that begin the run, which go on with it too."""
        if not anew and self.run.exists():
            return ["--resume", str(self.run)]
        return [*self.begin(self.run), f"data.num_workers={workers}"]

    def command(
        self,
        *words: object,
        number: int | None = None,
        after: float = 0.0,
        fails: bool = False,
        disturbed: Disturbed | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Said:
        """Runs a command and holds what must be true of every one.

        Args:
            words: the command line.
            number: a signal that it gets.
            after: seconds until then.
            fails: whether it must not succeed.
            disturbed: what the machine does to it.
            env: variables of its environment.
        """
        before = {name: fingerprint(getattr(self, name)) for name in ("strange", "images", "cwd")}
        said = run(words, self.cwd, number, after, disturbed, env)
        shown = " ".join(map(str, words)) + (
            f" [signal {number} after {after:.2f} s]" if number else ""
        )
        shown += f" [{disturbed}]" if disturbed else ""
        self.history.append(f"{shown} -> {said.code}")
        kind = "pretrain --resume" if "--resume" in words else str(words[0])
        self.commands[kind] += 1
        self.exits["killed" if said.code < 0 else str(said.code)] += 1
        told = "\n".join([*self.history, said.text[-4000:]])
        # In its first moments a process has no handlers yet.
        early = number is not None and after < 0.2
        killed = said.code == -(number or 0) and (number == signal.SIGKILL or early)
        killed |= early and said.text.rstrip().endswith("KeyboardInterrupt")
        if not killed:
            assert said.code in DOCUMENTED, told
            assert "Traceback (most recent call last)" not in said.text, told
            assert "details in" not in said.text, f"an error that nobody foresaw\n{told}"
        if said.code and not killed:
            lines = [line for line in said.text.splitlines() if line.strip()]
            assert lines, f"nothing is said\n{told}"
            assert lines[-1].startswith("solo-ext"), f"no line of its own at the end\n{told}"
        assert not (fails and said.code == 0), told
        for name, held in before.items():
            assert fingerprint(getattr(self, name)) == held, f"{name} was changed\n{told}"
        return said

    def check_finished(self, run: Path | None = None) -> None:
        """A run, or a copy of it, that ended by itself is the undisturbed one, to the last bit."""
        if not self.as_begun:
            return
        whole, _ = self.whole()
        told = "\n".join(self.history)
        one, two = checkpoints(whole), checkpoints(run or self.run)
        assert len(two) == 1, f"{two}\n{told}"
        a, b = (torch.load(c[-1].path, weights_only=True) for c in (one, two))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            assert_same(a[part], b[part], f"{part}\n{told}\n")
        # A log that was copied before its checkpoint lacks lines.
        if run is None and self.trusted_log and (self.run / METRICS).exists():
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
        self.history.append(f"{how} {file.relative_to(self.run)}, seed {seed}")
        if file.suffix != ".ckpt":
            self.trusted_log = False
        size = file.stat().st_size if file.exists() else 0
        if how == "truncate" and file.is_file():
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

    @contextlib.contextmanager
    def full_disk(self, pages: int) -> Iterator[None]:
        """Leaves so many pages of room on the disk of the runs, for the block."""
        ballast = fill(self.runs)
        os.truncate(ballast, max(0, ballast.stat().st_size - pages * 4096))
        self.history.append(f"a disk with {pages} pages of room")
        try:
            yield
        finally:
            ballast.unlink()

    def take_older(self) -> None:
        """Puts a run of an older version of this package in place of the run."""
        take_older(self.run, self.images)
        self.as_begun = self.trusted_log = False
        self.history.append("a run of an older version")

    def set_times(self, seconds: float) -> None:
        """Moves the times of all files of the run directory."""
        for file in self.files():
            if file.is_file():
                held = file.stat()
                os.utime(file, (held.st_atime + seconds, held.st_mtime + seconds))
        self.history.append(f"times of files moved by {seconds} s")

    def copy_files(self, pause: float, seed: int) -> Path:
        """Copies the run directory as it is now, file by file, which takes a while."""
        copy = self.runs / f"copy-{len(self.history)}"
        held = self.files()
        random.Random(seed).shuffle(held)
        for file in held:
            target = copy / file.relative_to(self.run)
            target.parent.mkdir(parents=True, exist_ok=True)
            # It may be gone by now, as for any program that copies.
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(file, target, follow_symlinks=False)
            time.sleep(pause)
        self.history.append(f"copied {[file.name for file in held]} to {copy.name}")
        return copy

    @contextlib.contextmanager
    def other_images(self, how: str, seed: int) -> Iterator[None]:
        """Changes the images for the block."""
        kept = self.folder / "kept"
        shutil.copytree(self.images, kept)
        draw = random.Random(seed)
        file = draw.choice(sorted(self.images.rglob("*.png")))
        if how == "add":
            shutil.copy(file, file.with_name("more.png"))
        elif how == "remove":
            file.unlink()
        elif how == "replace":
            # By a file of another size: that of one of the same is not promised to be noticed.
            side = draw.choice([8, 24])
            Image.frombytes("RGB", (side, side), draw.randbytes(3 * side * side)).save(file)
        else:
            file.parent.rename(file.parent.with_name("renamed"))
        self.history.append(f"images: {how} {file.relative_to(self.images)}")
        try:
            yield
        finally:
            shutil.rmtree(self.images)
            kept.rename(self.images)
            self.history.append("images as before")

    def move(self) -> None:
        """Gives the run directory another name."""
        if self.run.is_dir():
            target = self.runs / f"moved-{len(self.history)}"
            shutil.move(self.run, target)
            self.run = target
            self.history.append(f"moved to {target.name}")


CHANGES_OF_IMAGES = ("add", "remove", "replace", "rename")
DAMAGES = ("truncate", "flip", "append", "delete", "folder", "pipe", "link", "endless")
