"""Tests of the mends: with each, and with the host's own code back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from solo_ext.host import Host, detect
from solo_ext.host.mends import MENDS, unmended

Without = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def without(loaded: Host, request: pytest.FixtureRequest) -> Iterator[Without]:
    """Opens a block without the mend of the test's mark; a test that never does shows nothing.

    Tests are skipped on hosts that do not need the mend.
    """
    name = request.node.get_closest_marker("mend").args[0]
    generation = detect().generation
    if generation not in MENDS[name].generations:
        pytest.skip(f"solo-learn {generation} does not have this defect")
    used = False

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        nonlocal used
        used = True
        with unmended(name):
            yield

    failed = request.session.testsfailed
    yield block
    if request.session.testsfailed == failed:
        assert used, f"the test of {name!r} never looked at the host's own code"
