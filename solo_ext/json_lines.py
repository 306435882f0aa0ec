"""Files of one JSON object per line, which processes may be killed over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from solo_ext.paths import refuse_link, writing


def append_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines; what a killed process left half written is removed first.

    Args:
        file: made where it is missing; its folder exists.
        entries: one line each.

    Raises:
        UserError: the file is a link.
    """
    text = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
    with writing(file), refuse_link(file).open("a+b") as held:
        held.seek(0)
        content = held.read()
        held.truncate(content.rfind(b"\n") + 1)
        held.write(text.encode())
        held.flush()
        os.fsync(held.fileno())


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file, those lines passed over that hold none; none without a file."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
