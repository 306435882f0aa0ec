"""Tests of the patches: with each, and with the host's own code back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from solo_ext.host import Host, detect
from solo_ext.host.patches import PATCHES

Without = Callable[[], contextlib.AbstractContextManager[None]]


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
    if patch.changes_numbers:
        patch.remove()
    if request.session.testsfailed == failed:
        assert used, f"the test of {name!r} never looked at the host's own code"
