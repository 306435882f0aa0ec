"""Names of protocols, without what the protocols import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from annotated_types import MinLen
from pydantic import create_model

from solo_ext.config.check import validated
from solo_ext.config.schema import OnlineProtocol
from solo_ext.core.errors import ConfigError, unknown_name

SUITE = "suite"
"""Name on the command line for several protocols with one report, instead of a protocol's."""
Protocols = Annotated[list[OnlineProtocol], MinLen(1)]


def check_protocol(name: str, settings: Mapping[str, Any]) -> None:
    """Refuses a protocol that there is not, also among those of a suite.

    Raises:
        ConfigError: there is none of that name.

    >>> check_protocol("suite", {"protocols": ["knnn"]})
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: protocols.0='knnn': not a valid choice; did ...
    """
    if name == SUITE:
        given = {key: value for key, value in settings.items() if key == "protocols"}
        validated(create_model("Suite", protocols=(Protocols, [SUITE])), given)
    elif name not in get_args(OnlineProtocol):
        raise unknown_protocol(name)


def unknown_protocol(name: str) -> ConfigError:
    """Error for a protocol that there is not.

    >>> unknown_protocol("knnn").remedy[:20]
    "did you mean 'knn'? "
    """
    known = (*get_args(OnlineProtocol), SUITE)
    return unknown_name("protocol", name, "protocol", known, all_in="docs/guides/evaluate.md")
