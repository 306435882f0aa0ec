"""Runs that are watched, and the patches: with each, and with the host's own code back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.host import Host, detect
from solo_ext.host.patches import PATCHES

Without = Callable[[], contextlib.AbstractContextManager[None]]


def the_loss(method: Any, loss: Tensor) -> float:
    return float(loss)


class Interrupted(Exception):
    """The process is stopped."""


class Watch(Callback):
    """Notes ``read(method, loss)`` at every batch; stops before optimiser step ``stop``.

    Callbacks come before a method's own ``on_train_batch_end``: what is noted there is what the
    method is about to use. ``before`` and ``state`` are those of the run's start and end.
    """

    def __init__(
        self, read: Callable[[Any, Tensor], Any] = the_loss, stop: int | None = None
    ) -> None:
        self.read, self.stop = read, stop
        self.seen: list[Any] = []
        self.metrics: dict[str, float] = {}
        self.before: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.method: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.method = pl_module
        self.before = {k: v.clone() for k, v in pl_module.state_dict().items()}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.stop:
            raise Interrupted

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(self.read(pl_module, outputs["loss"].detach()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        self.state = {k: v.clone() for k, v in pl_module.state_dict().items()}


@contextlib.contextmanager
def unpatched(name: str) -> Iterator[None]:
    """Puts the host's own code back inside the block, where nothing applies the patch."""
    patch = PATCHES[name]
    put_in = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patch.undo]
    undo, replacements = list(patch.undo), patch.replacements
    patch.remove()
    patch.replacements = lambda: ()
    try:
        yield
    finally:
        patch.undo, patch.replacements = undo, replacements
        for owner, attribute, value in put_in:
            setattr(owner, attribute, value)


@pytest.fixture
def without(loaded: Host, request: pytest.FixtureRequest) -> Iterator[Without]:
    """Opens a block without the patch of the test's mark; a test that never does shows nothing.

    Tests are skipped on hosts that do not need the patch.
    """
    name = request.node.get_closest_marker("patch").args[0]
    patch = PATCHES[name]
    patch.apply()
    if not patch.undo:
        pytest.skip(f"solo-learn {detect().generation} does not have this defect")
    used = False

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        nonlocal used
        used = True
        with unpatched(name):
            yield

    failed = request.session.testsfailed
    yield block
    if patch.changes_results:
        patch.remove()
    if request.session.testsfailed == failed:
        assert used, f"the test of {name!r} never looked at the host's own code"
