"""What the library reports while it works, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the time: progress bars replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """A program whose root logger prints, prints these too."""
        return not any(
            type(handler) is logging.StreamHandler and handler.level <= record.levelno
            for handler in logging.root.handlers
        )

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_messages() -> None:
    """Prints the messages of the ``solo_ext`` loggers from now on.

    Call it again after something else configured logging: Hydra's ``job_logging: disabled``, as in
    solo-learn's configs, disables every logger that exists.
    """
    logger = logging.getLogger("solo_ext")
    for name, known in logging.root.manager.loggerDict.items():
        if isinstance(known, logging.Logger) and name.partition(".")[0] == "solo_ext":
            known.disabled = False
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
