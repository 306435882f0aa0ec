"""Sequences of what happens to a run, drawn by a machine.

After every command: success or one line, never a traceback; what ends by itself is the undisturbed
run; nothing is changed outside the run directory; no process is left behind.

ATTACK_SEQUENCES=1000 pytest -m matrix tests/attack draws so many, other ones each time.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
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

from tests.attack.world import DAMAGES, RUNS, Server, World

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX"),
]
SEQUENCES = int(os.environ.get("ATTACK_SEQUENCES", 0))
SIGNALS = (None, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)
PROTOCOLS = ("knn", "linear", "lowshot", "clustering", "retrieval", "geometry", "suite")
FORMATS = ("timm", "safetensors", "torchvision", "detectron2")


class Attack(RuleBasedStateMachine):
    """Somebody's week with one run."""

    server: ClassVar[Server]
    undisturbed: ClassVar[Path]
    world: World

    @initialize(method=st.sampled_from(sorted(RUNS)))
    def begin(self, method: str) -> None:
        self.held = tempfile.TemporaryDirectory()
        self.world = World(Path(self.held.name), self.server, self.undisturbed, method)
        self.world.whole()

    @rule(number=st.sampled_from(SIGNALS), moment=st.floats(0, 1), anew=st.booleans())
    def train(self, number: int | None, moment: float, anew: bool) -> None:
        """The command that begins it, or ``--resume``; perhaps with a signal on the way."""
        world = self.world
        after = moment * world.whole()[1]
        resumed = ["--resume", world.run]
        words = world.begin(world.run) if anew or not world.run.exists() else resumed
        said = world.command("pretrain", *words, number=number, after=after)
        if said.code == 0:
            world.check_finished()

    @rule(change=st.sampled_from(["optimizer.lr=0.1", "seed=7", "max_epochs=5"]))
    def change_a_setting(self, change: str) -> None:
        """A directory takes no run of other settings, once it holds something of this one."""
        world = self.world
        if any(file.suffix == ".ckpt" for file in world.files()):
            world.command("pretrain", *world.begin(world.run), change, fails=True)

    @rule(protocol=st.sampled_from(PROTOCOLS))
    def evaluate(self, protocol: str) -> None:
        world = self.world
        said = world.command("eval", protocol, world.run)
        assert said.code == 0 or world.history, said.text

    @rule(form=st.sampled_from(FORMATS))
    def export(self, form: str) -> None:
        self.world.command("export", self.world.run, f"--format={form}")

    @rule(place=st.integers(0, 40), how=st.sampled_from(DAMAGES), seed=st.integers(0, 2**32))
    def damage(self, place: int, how: str, seed: int) -> None:
        self.world.damage(place, how, seed)

    @rule()
    def move(self) -> None:
        self.world.move()

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.held.cleanup()


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Attack]]:
    Attack.server, Attack.undisturbed = Server(), tmp_path_factory.mktemp("undisturbed")
    yield Attack
    Attack.server.close()


@pytest.mark.timeout(0)
def test_every_sequence_ends_in_one_line_or_as_if_left_alone(attack: type[Attack]) -> None:
    options: dict[str, Any] = {
        "max_examples": SEQUENCES or 4,
        "stateful_step_count": 8,
        "deadline": None,
        "derandomize": not SEQUENCES,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "phases": [Phase.generate] if SEQUENCES else [Phase.explicit, Phase.generate],
    }
    run_state_machine_as_test(attack, settings=settings(**options))  # type: ignore[no-untyped-call]
