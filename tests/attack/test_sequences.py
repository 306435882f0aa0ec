"""Sequences of what happens to a run, drawn by a machine.

After every command: success or one line, never a traceback; what ends by itself is the undisturbed
run; nothing is changed outside the run directory; no process is left behind.

ATTACK_SEQUENCES=1000 pytest -m matrix tests/attack/test_sequences.py draws so many, other ones each
time, and adds lines to a record as it goes: it may be stopped, and what several starts have run
adds up. A sequence that fails is told by its commands, signals and seeds, and the others go on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.attack.world import CHANGES_OF_IMAGES, DAMAGES, RUNS, Disturbed, Outcomes, World
from tests.mounts import small_disk

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.ci,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX"),
]
SEQUENCES = int(os.environ.get("ATTACK_SEQUENCES", 0))
BATCH = 20
"""Sequences of one line of the record."""
SIGNALS = (None, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)
CHANGES = (
    "optimizer.lr=0.1",
    "seed=7",
    "max_epochs=5",
    "data.num_workers=1",
    "log_every_n_steps=3",
)
PROTOCOLS = (
    *("knn", "linear", "lowshot", "clustering", "retrieval", "geometry"),
    "suite protocols=[knn,geometry]",
)
FORMATS = ("timm", "safetensors", "torchvision", "detectron2")
STEPS = (-400 * 86400.0, -3600.0, 3600.0, 400 * 86400.0)
"""Seconds that a clock is set, back or forth."""
PAGES = st.integers(0, 120)
"""Room that a full disk has left: a checkpoint of these runs has some 40 pages."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def held(step: Callable[..., None]) -> Callable[..., None]:
    """A step whose failure is told and ends its sequence alone.

    Hypothesis would repeat the sequence, and call it flaky: a signal never comes at the same
    moment twice.
    """

    @functools.wraps(step)
    def wrapper(self: Attack, **drawn: Any) -> None:
        if self.broken:
            return
        self.events[step.__name__] += 1
        try:
            step(self, **drawn)
        except Exception as error:
            self.broken = True
            shown = "" if isinstance(error, AssertionError) else traceback.format_exc()
            said = f"{self.world.method}\n{error}\n{shown}"
            self.outcomes.failures.append(said)
            print(f"sequence fails: {said}", flush=True)

    return wrapper


class Attack(RuleBasedStateMachine):
    """A random sequence of commands and faults on one run."""

    events: Counter[str]
    undisturbed: ClassVar[Path]
    outcomes: ClassVar[Outcomes]
    world: World

    @initialize(
        method=st.sampled_from(sorted(RUNS)),
        number=st.sampled_from((0, *SIGNALS)),
        moment=st.floats(0, 1),
        older=st.sampled_from([False] * 9 + [True]),
    )
    def begin(self, method: str, number: int | None, moment: float, older: bool) -> None:
        self.broken, self.events = False, Counter[str]()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.mounted = True
        try:
            self.stack.enter_context(small_disk(folder / "runs", "size=16m"))
        except pytest.skip.Exception:
            self.mounted = False
        self.world = World(folder, self.undisturbed, method)
        if older:
            self.world.take_older()
        # What comes to a folder that is empty is tried too.
        elif number != 0:
            self.train(number=number, moment=moment, anew=True, workers=0)

    @rule(
        number=st.sampled_from(SIGNALS),
        moment=st.floats(0, 1),
        anew=st.booleans(),
        workers=st.sampled_from([0, 0, 0, 1]),
    )
    @held
    def train(self, number: int | None, moment: float, anew: bool, workers: int) -> None:
        """The command that begins it, or ``--resume``; perhaps with a signal on the way."""
        world = self.world
        words = world.words_to_train(anew, workers)
        said = world.command("pretrain", *words, number=number, after=moment * world.whole()[1])
        if said.code == 0:
            world.check_finished()

    @rule(change=st.sampled_from(CHANGES), resumed=st.booleans(), force=st.booleans())
    @held
    def change_a_setting(self, change: str, resumed: bool, force: bool) -> None:
        """A directory takes no run of other settings once it holds something of this one."""
        world = self.world
        words = [*world.words_to_train(not resumed), change, *["--force"] * force]
        began = any(file.suffix == ".ckpt" for file in world.files())
        as_before = change.startswith("data.num_workers")
        same_numbers = as_before or change.startswith("log_every_n_steps")
        refused = began and world.as_begun and not force and not same_numbers
        said = world.command("pretrain", *words, fails=refused)
        # The directory now holds a run of other settings, or a part of one, or its log other lines.
        world.as_begun &= said.code != 0 or as_before

    @rule(protocol=st.sampled_from(PROTOCOLS))
    @held
    def evaluate(self, protocol: str) -> None:
        world = self.world
        name, *settings = protocol.split()
        world.command("eval", name, world.run, *settings)

    @rule(form=st.sampled_from(FORMATS))
    @held
    def export(self, form: str) -> None:
        self.world.command("export", self.world.run, f"--format={form}")

    @rule(pages=PAGES, what=st.sampled_from(["pretrain", "eval", "export"]))
    @held
    def fill_the_disk(self, pages: int, what: str) -> None:
        """During one command; then there is room again."""
        world = self.world
        if not self.mounted:
            return
        words = {
            "pretrain": world.words_to_train(False),
            "eval": ["knn", world.run],
            "export": [world.run, "--format=timm"],
        }
        with world.full_disk(pages):
            said = world.command(what, *words[what])
        if what == "pretrain" and said.code == 0:
            world.check_finished()

    @rule(place=st.integers(0, 40), how=st.sampled_from(DAMAGES), seed=st.integers(0, 2**32))
    @held
    def damage(self, place: int, how: str, seed: int) -> None:
        self.world.damage(place, how, seed)

    @rule()
    @held
    def move(self) -> None:
        self.world.move()

    @rule(
        number=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]),
        node=st.integers(0, 1),
        after=st.floats(0.3, 4),
    )
    @held
    def wait_for_a_node_that_does_not_come(self, number: int, node: int, after: float) -> None:
        world, place = self.world, self.world.runs / "nodes"
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        said = world.command(
            *("pretrain", *world.begin(place), "num_nodes=2", "strategy=ddp"),
            **{"number": number, "after": after, "fails": True},
            env=address | {"NODE_RANK": str(node)},
        )
        assert said.code in (2, 128 + number), said
        shutil.rmtree(place, ignore_errors=True)

    @rule(step=st.sampled_from(STEPS), moment=st.floats(0, 1), files=st.booleans())
    @held
    def set_the_clock(self, step: float, moment: float, files: bool) -> None:
        """It steps while a run trains; what was written before may be of a later time."""
        world = self.world
        if files:
            world.set_times(-step)
        changed = Disturbed(step, moment * world.whole()[1])
        said = world.command("pretrain", *world.words_to_train(False), disturbed=changed)
        if said.code == 0:
            world.check_finished()

    @rule(
        moment=st.floats(0, 1),
        pause=st.floats(0, 0.1),
        seed=st.integers(0, 2**32),
        what=st.sampled_from(["pretrain", "eval", "export"]),
    )
    @held
    def copy_while_it_trains(self, moment: float, pause: float, seed: int, what: str) -> None:
        world = self.world
        with ThreadPoolExecutor() as pool:
            training = pool.submit(world.command, "pretrain", *world.words_to_train(False))
            time.sleep(moment * world.whole()[1])
            copy = world.copy_files(pause, seed)
            trained = training.result()
        if trained.code == 0:
            world.check_finished()
        words = {
            "pretrain": ["--resume", copy],
            "eval": ["knn", copy],
            "export": [copy, "--format=timm"],
        }
        said = world.command(what, *words[what])
        if what == "pretrain" and said.code == 0:
            world.check_finished(copy)
        shutil.rmtree(copy, ignore_errors=True)

    @rule(
        what=st.sampled_from(["pretrain", "pretrain", "eval", "export"]),
        delays=st.tuples(st.floats(0, 0.05), st.floats(0, 0.05)),
        moment=st.floats(0, 0.5),
        locks=st.integers(0, 1),
    )
    @held
    def two_at_once(
        self, what: str, delays: tuple[float, float], moment: float, locks: int
    ) -> None:
        """Two machines on one run directory of a slow file system."""
        world = self.world
        words = {
            "pretrain": world.words_to_train(False),
            "eval": ["knn", world.run],
            "export": [world.run, "--format=timm"],
        }
        one, two = (Disturbed(delay=delay, locks=locks) for delay in delays)
        train = world.words_to_train(False)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(world.command, "pretrain", *train, disturbed=one)
            time.sleep(moment * world.whole()[1])
            second = pool.submit(world.command, what, *words[what], disturbed=two)
            codes = [first.result().code, *[second.result().code] * (what == "pretrain")]
        if 0 in codes:
            world.check_finished()

    @rule(
        how=st.sampled_from(CHANGES_OF_IMAGES),
        seed=st.integers(0, 2**32),
        force=st.booleans(),
    )
    @held
    def change_the_images(self, how: str, seed: int, force: bool) -> None:
        world = self.world
        began = any(file.suffix == ".ckpt" for file in world.files())
        with world.other_images(how, seed):
            words = [*world.words_to_train(False), *["--force"] * force]
            refused = began and world.as_begun and not force
            said = world.command("pretrain", *words, fails=refused)
            if world.run.is_dir():
                world.command("eval", "knn", world.run)
        world.as_begun &= said.code != 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            world = self.world
            self.outcomes.add(commands=world.commands, outcomes=world.exits, events=self.events)
            self.stack.close()


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Attack]]:
    Attack.undisturbed = tmp_path_factory.mktemp("undisturbed")
    Attack.outcomes = Outcomes("sequences", BATCH, kept=SEQUENCES > 0)
    yield Attack
    Attack.outcomes.write()


@pytest.mark.timeout(0)
def test_every_sequence_ends_in_one_line_or_as_if_left_alone(attack: type[Attack]) -> None:
    options: dict[str, Any] = {
        "max_examples": SEQUENCES or 2,
        "stateful_step_count": 8,
        "deadline": None,
        "derandomize": not SEQUENCES,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "phases": [Phase.generate],
    }
    run_state_machine_as_test(attack, settings=settings(**options))  # type: ignore[no-untyped-call]
    failures = attack.outcomes.failures
    assert not failures, f"{len(failures)} sequences failed, the first:\n{failures[0]}"
