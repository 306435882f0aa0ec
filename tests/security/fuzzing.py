"""Fuzz tests: how long they run, and how reading may end.

HYPOTHESIS_PROFILE=long takes new examples, thousands of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from solo_ext.core.errors import UserError

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def fuzzed(few: int, many: int) -> settings:
    """Decorator of a fuzz test: the same ``few`` examples each time, or ``many`` new ones."""
    return settings(
        max_examples=many if LONG else few,
        derandomize=not LONG,
        deadline=None,
        database=None,
        print_blob=True,
        # Not explained: that takes longer than all the rest.
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        # Files are written anew for every example; composing one takes a while.
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
            HealthCheck.filter_too_much,
        ],
    )


def outcome(read: Callable[..., Any], *args: Any) -> str:
    """``loads`` or ``refused``; anything else is raised."""
    try:
        read(*args)
    except UserError as error:
        said = str(error)
    else:
        return "loads"
    assert len(said.splitlines()) == 1
    assert said.strip()
    return "refused"
