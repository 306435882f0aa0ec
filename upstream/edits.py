"""Edits of files by anchors: pieces of a line, so that no line of solo-learn's is kept here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

LONGEST_ANCHOR = 72


class EditError(Exception):
    """An edit that cannot be read, or whose anchor is gone or ambiguous."""


@dataclass
class Edit:
    """One change of one or several files; README.md describes the fields."""

    file: str | list[str]
    after: str = ""
    before: str = ""
    replace: str = ""
    delete: str = ""
    through: str = ""
    within: str | list[str] = ""
    text: str = ""
    indent: int = 0
    append: bool = False

    @classmethod
    def read(cls, given: Any) -> Edit:
        """Checks the keys of one item of ``edits.yaml``."""
        allowed = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or "file" not in given or set(given) - allowed:
            raise EditError(f"{given!r} is no edit: `file` and some of {sorted(allowed)}")
        for key, value in given.items():
            several = isinstance(value, list) and key in ("file", "within")
            kind = type(getattr(cls, key, ""))
            if not all(type(one) is kind for one in (value if several else [value])):
                raise EditError(f"{given['file']}: {key} is {value!r}, no {kind.__name__}")
        edit = cls(**given)
        if sum(map(bool, (*edit._anchors()[:4], edit.append))) != 1:
            raise EditError(f"{edit.file}: give one of after, before, replace, delete, append")
        for anchor in edit._anchors():
            if "\n" in anchor or len(anchor) > LONGEST_ANCHOR:
                raise EditError(f"{edit.file}: anchor {anchor!r} is no short piece of a line")
        return edit

    def _anchors(self) -> list[str]:
        within = [self.within] if isinstance(self.within, str) else self.within
        return [self.after, self.before, self.replace, self.delete, self.through, *within]

    def apply(self, root: Path) -> None:
        """Changes the files below ``root``.

        Raises:
            EditError: names the file and the anchor that is not there once.
        """
        for name in [self.file] if isinstance(self.file, str) else self.file:
            path = root / name
            if not path.is_file():
                raise EditError(f"{name}: there is no such file")
            try:
                path.write_text(self._edited(path.read_text()))
            except (EditError, UnicodeDecodeError) as error:
                raise EditError(f"{name}: {error}") from None

    def _edited(self, content: str) -> str:
        lines = content.splitlines()
        start, stop = 0, len(lines)
        for anchor in self._anchors()[5:]:
            if anchor:
                start = _find(lines, anchor, start, stop)
                stop = _end_of_block(lines, start, stop)
        if self.append:
            header = lines[start] if self.within else ""
            lines[stop:stop] = self._indented(header)
            return "\n".join(lines) + "\n"
        at = _find(lines, self.after or self.before or self.replace or self.delete, start, stop)
        if self.after:
            lines[at + 1 : at + 1] = self._indented(lines[at])
        elif self.before:
            lines[at:at] = self._indented(lines[at])
        else:
            last = at
            if self.through:
                there = [i for i in range(at, stop) if self.through in lines[i]]
                if not there:
                    raise EditError(
                        f"{self.through!r} does not follow {self.replace or self.delete!r}"
                    )
                last = there[0]
            lines[at : last + 1] = self._replaced(lines[at : last + 1]) if self.replace else []
        return "\n".join(lines) + "\n"

    def _replaced(self, lines: list[str]) -> list[str]:
        head = lines[0].partition(self.replace)[0]
        # What follows `through`, which may be on the line of the anchor, after the anchor.
        rest = lines[-1] if len(lines) > 1 else lines[0].partition(self.replace)[2]
        tail = rest.partition(self.through)[2] if self.through else rest
        first, *others = self.text.splitlines() or [""]
        whole = "\n".join([head + first, *self._indented(lines[0], others)]) + tail
        return [line.rstrip() for line in whole.splitlines()] if whole.strip() else []

    def _indented(self, beside: str, lines: list[str] | None = None) -> list[str]:
        indent = " " * (len(beside) - len(beside.lstrip()) + self.indent)
        given = self.text.splitlines() if lines is None else lines
        return [(indent + line).rstrip() for line in given]


def _find(lines: list[str], anchor: str, start: int, stop: int) -> int:
    found = [i for i in range(start, stop) for _ in range(lines[i].count(anchor))]
    if len(found) != 1:
        where = ", ".join(str(i + 1) for i in found)
        problem = f"is there {len(found)} times, in lines {where}" if found else "is gone"
        raise EditError(f"anchor {anchor!r} {problem}")
    return found[0]


def _end_of_block(lines: list[str], start: int, stop: int) -> int:
    """The line after the last one that is indented more than ``start``, or closes its bracket."""
    depth = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    for i in range(start + 1, stop):
        inner = lines[i].lstrip()
        if not inner:
            continue
        indent = len(lines[i]) - len(inner)
        if indent < depth or (indent == depth and inner[0] not in ")]}"):
            break
        end = i + 1
    return end


def read_edits(path: Path) -> list[Edit]:
    """The edits of a patch; none if it has only new files.

    Raises:
        EditError: they cannot be read.
    """
    try:
        given = yaml.safe_load(path.read_text()) if path.is_file() else []
        if not isinstance(given, list):
            raise EditError("it is no list of edits")
        return [Edit.read(item) for item in given]
    except (yaml.YAMLError, EditError) as error:
        raise EditError(f"{path.name}: {' '.join(str(error).split())}") from None
