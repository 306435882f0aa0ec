"""Writes our fixes and methods as patches for ``git am``, made from a checkout of solo-learn.

    python upstream/make.py --onto CHECKOUT --out FOLDER [--only fixes/0001] [--only methods]

Each fix is made from the checkout alone. Each method is made on top of the methods before it, or
with ``--only`` from the checkout alone. The checkout is not changed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edits import EditError, read_edits

HERE = Path(__file__).parent
KINDS = ("fixes", "methods")
HEADED = "solo/methods/__init__.py"


def patches(*only: str) -> list[Path]:
    """The folders of all patches in order, or of those whose names begin so."""
    every = [path.parent for kind in KINDS for path in sorted((HERE / kind).glob("*/message"))]
    if not only:
        return every
    chosen = [path for path in every if name(path).startswith(only)]
    if not chosen:
        raise SystemExit(f"no patch begins with {' or '.join(only)}; there are {listed(every)}")
    return chosen


def name(patch: Path) -> str:
    """A patch's kind and folder, as in ``fixes/0001-...``."""
    return f"{patch.parent.name}/{patch.name}"


def listed(found: list[Path]) -> str:
    """Names for a message."""
    return ", ".join(map(name, found)) or "none"


def git(tree: Path, *arguments: str) -> str:
    """Runs git in ``tree``; its output."""
    # An author of our own making where git knows none, which format-patch would refuse.
    known = subprocess.run(["git", "config", "user.email"], cwd=tree, capture_output=True)
    author = () if known.stdout else ("-c", "user.name=solo_ext", "-c", "user.email=none@localhost")
    command = ["git", *author, *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout


def fresh_clone(onto: Path, to: Path) -> Path:
    """Clones a checkout's HEAD, or makes a repository of a tree that is none."""
    if (onto / ".git").exists() or (onto / "objects").is_dir():
        subprocess.run(["git", "clone", "-q", "--shared", onto.resolve(), to], check=True)
    else:
        if not (onto / "solo").is_dir():
            raise SystemExit(f"{onto} is no checkout of solo-learn: it has no folder `solo`")
        shutil.copytree(onto, to, ignore=shutil.ignore_patterns("__pycache__"))
        git(to, "init", "-q")
        git(to, "add", "-A", "-f")
        git(to, "commit", "-q", "-m", "solo-learn")
    git(to, "checkout", "-q", "--detach")
    return to


@contextmanager
def clone(onto: Path) -> Iterator[Path]:
    """A fresh clone in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield fresh_clone(onto, Path(folder) / "solo-learn")


def apply(patch: Path, tree: Path) -> None:
    """Makes a patch's edits and adds its new files.

    Raises:
        EditError: with every edit that does not find its place.
    """
    problems = []
    try:
        edits = read_edits(patch / "edits.yaml")
    except EditError as error:
        raise EditError(f"{name(patch)}: {error}") from None
    for edit in edits:
        try:
            edit.apply(tree)
        except EditError as error:
            problems.append(f"{name(patch)}: {error}")
    try:
        head = _licence(tree)
    except (OSError, StopIteration):
        raise EditError(f"{name(patch)}: {HEADED} has no licence head to copy") from None
    for source in sorted((patch / "new").rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        target = tree / source.relative_to(patch / "new")
        if target.exists():
            problems.append(f"{name(patch)}: {source.relative_to(patch / 'new')} exists already")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_text()
        # Every Python file of theirs begins with their licence, which is not kept here.
        if target.suffix == ".py" and content:
            content = head + content
        target.write_text(content)
    if problems:
        raise EditError("\n".join(problems))


def _licence(tree: Path) -> str:
    lines = (tree / HEADED).read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return "\n".join(lines[:end]).rstrip() + "\n\n"


def commit(patch: Path, tree: Path) -> str:
    """Applies a patch, commits it with its message; the patch as a mail for ``git am``."""
    apply(patch, tree)
    git(tree, "add", "-A", "-f")
    git(tree, "commit", "-q", "--no-verify", "-F", str((patch / "message").resolve()))
    return git(tree, "format-patch", "-1", "--stdout", "--no-signature", "--zero-commit")


def make(onto: Path, *only: str) -> tuple[dict[str, str], list[str]]:
    """Every patch as a mail, by its name, and the edits that do not find their place."""
    made: dict[str, str] = {}
    problems: list[str] = []
    with clone(onto) as tree:
        base = git(tree, "rev-parse", "HEAD").strip()
        for patch in patches(*only):
            before = git(tree, "rev-parse", "HEAD").strip()
            in_series = patch.parent.name == "methods" and not only
            if not in_series or not any(other.startswith("methods/") for other in made):
                before = base
            git(tree, "checkout", "-q", "--detach", before)
            try:
                made[name(patch)] = commit(patch, tree)
            except EditError as error:
                # Edits at the same place are lost for the same reason.
                problems += dict.fromkeys(str(error).splitlines())
                git(tree, "reset", "-q", "--hard", before)
                git(tree, "clean", "-q", "-fdx")
    return made, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--onto", type=Path, required=True, help="a checkout of solo-learn")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the patches")
    parser.add_argument("--only", action="append", default=[], help="beginning of a patch's name")
    given = parser.parse_args()
    made, problems = make(given.onto, *given.only)
    for patch, mail in made.items():
        path = given.out / f"{patch}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mail)
    print(f"{len(made)} patches in {given.out}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
