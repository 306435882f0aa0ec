"""Messages to users on standard error, by the loggers of the package."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which progress bars replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drops records that a handler of the root logger already prints."""
        return not any(
            type(handler) is logging.StreamHandler and handler.level <= record.levelno
            for handler in logging.root.handlers
        )

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_messages() -> None:
    """Prints the messages of the ``solo_ext`` loggers on standard error from now on.

    Call it again after other code configured logging: Hydra's ``job_logging: disabled``, as in
    solo-learn's configs, disables every existing logger.

    >>> show_messages()
    >>> logging.getLogger("solo_ext.data").getEffectiveLevel() == logging.INFO
    True
    """
    logger = logging.getLogger("solo_ext")
    for name, known in logging.root.manager.loggerDict.items():
        if isinstance(known, logging.Logger) and name.partition(".")[0] == "solo_ext":
            known.disabled = False
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
