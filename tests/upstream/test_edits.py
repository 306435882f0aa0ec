"""What the keys of `edits.yaml` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edits import LONGEST_ANCHOR, Edit, EditError, read_edits

TEXT = """\
class A:
    def f(
        self,
    ):
        x = 1

    def g(self):
        x = 1


D = {
    'a': 1,
}
"""


def edited(folder: Path, **keys: Any) -> str:
    (folder / "a.py").write_text(TEXT)
    Edit.read({"file": "a.py"} | keys).apply(folder)
    return (folder / "a.py").read_text()


@pytest.mark.parametrize(
    ("keys", "old", "new"),
    [
        (
            {"after": "def g", "indent": 4, "text": "y\n  z"},
            "lf):\n",
            "lf):\n        y\n          z\n",
        ),
        ({"before": "'a'", "text": "'0': 0,"}, "    'a'", "    '0': 0,\n    'a'"),
        ({"within": "def g", "replace": "= 1", "text": "= 2"}, "x = 1\n\n\n", "x = 2\n\n\n"),
        (
            {"within": "def g", "replace": "x", "text": "if y:\n    x"},
            "x = 1\n\n\n",
            "if y:\n            x = 1\n\n\n",
        ),
        ({"replace": "f(", "through": "self,", "text": "f(self,"}, "f(\n        self,", "f(self,"),
        ({"replace": "self,"}, "        self,\n", ""),
        ({"delete": "'a'"}, "    'a': 1,\n", ""),
        ({"delete": "D = {", "through": "}"}, "D = {\n    'a': 1,\n}\n", ""),
        (
            {"within": ["class A", "def f"], "append": True, "indent": 4, "text": "y"},
            "x = 1\n\n    def",
            "x = 1\n        y\n\n    def",
        ),
        ({"append": True, "text": "\nE"}, "}\n", "}\n\nE\n"),
    ],
)
def test_an_edit(tmp_path: Path, keys: dict[str, Any], old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    assert edited(tmp_path, **keys) == TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"after": "nothing"}, "a.py: anchor 'nothing' is gone"),
        ({"after": "x = 1"}, "a.py: anchor 'x = 1' is there 2 times, in lines 5, 8"),
        ({"within": "def h", "after": "x"}, "a.py: anchor 'def h' is gone"),
        ({"within": "def g", "after": "self,"}, "a.py: anchor 'self,' is gone"),
        ({"delete": "def g", "through": "def f"}, "a.py: 'def f' does not follow 'def g'"),
        ({"after": "x", "before": "y"}, "one of after, before, replace, delete, append"),
        ({"behind": "x"}, "is no edit"),
        ({"after": "x" * (LONGEST_ANCHOR + 1)}, "no short piece of a line"),
        ({"after": 1}, "a.py: after is 1, no str"),
        ({"append": True, "text": "y", "indent": "4"}, "a.py: indent is '4', no int"),
        ({"file": "b.py", "after": "x"}, "b.py: there is no such file"),
    ],
)
def test_an_edit_without_place(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(EditError) as raised:
        edited(tmp_path, **keys)
    assert message in str(raised.value)
    assert (tmp_path / "a.py").read_text() == TEXT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- file: a.py\n  after: [x", "line 2, column 10"),
        ("- file: a.py\n  after: x: y", "mapping values are not allowed here"),
        ("file: a.py", "it is no list of edits"),
        ("", "it is no list of edits"),
        ("- a.py", "'a.py' is no edit"),
    ],
)
def test_edits_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "edits.yaml").write_text(content)
    with pytest.raises(EditError) as raised:
        read_edits(tmp_path / "edits.yaml")
    assert str(raised.value).startswith("edits.yaml: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
