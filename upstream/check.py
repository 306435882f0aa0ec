"""Checks that the patches apply to a checkout of solo-learn, and do what they say.

    python upstream/check.py --onto CHECKOUT [--quick] [--only fixes/0001]

1. Every edit finds its place; on a newer main, this says which do not.
2. ``git am`` is clean on a fresh clone, for each fix alone and for the whole series in order.
3. Every new or changed file that was so before is formatted as upstream's version of black does.
4. Each patch's tests fail without the patches; all pass with them, as do upstream's that passed
   before. Each fix's tests also pass with that fix alone. ``--quick`` leaves this out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import yaml
from edits import read_edits
from make import HERE, clone, fresh_clone, git, make, name, patches

BASE = yaml.safe_load((HERE / "BASE").read_text())


class Report:
    """Prints one line for each check, and counts those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, check: str, problems: Iterable[str]) -> None:
        problems = list(problems)
        self.failed += bool(problems)
        print(f"{'FAILED' if problems else 'ok    '}  {check}", flush=True)
        for problem in problems:
            print(f"        {problem}", flush=True)


def applied(tree: Path, mails: Iterable[str]) -> list[str]:
    """Applies patches with ``git am``; what git says of the first that does not apply."""
    for mail in mails:
        done = subprocess.run(
            ["git", "-c", "user.name=check", "-c", "user.email=check@localhost", "am", "-q"],
            cwd=tree,
            input=mail,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            subprocess.run(["git", "am", "--abort"], cwd=tree, capture_output=True)
            return [(done.stdout + done.stderr).strip()]
    return []


def changed(tree: Path, base: str) -> list[str]:
    """Python files that differ from ``base``."""
    return git(tree, "diff", "--name-only", "--diff-filter=d", base, "--", "*.py").split()


def unformatted(tree: Path, files: list[str]) -> set[str]:
    """Files that black would change, or cannot read."""
    command = ["uv", "tool", "run", "-q", "--from", f"black=={BASE['black']}", "black"]
    options = ["--check", "--line-length", "100", *files]
    done = subprocess.run([*command, *options], cwd=tree, capture_output=True, text=True)
    if done.returncode not in (0, 1, 123):
        raise SystemExit(f"black {BASE['black']} cannot be run by uv: {done.stderr.strip()}")
    named = (line.partition("would reformat ")[2] for line in done.stderr.splitlines())
    found = {os.path.relpath(tree / path, tree) for path in named if path}
    return found | {line for line in done.stderr.splitlines() if line.startswith("error:")}


def tests_of(patch: Path) -> list[str]:
    """Test files that a patch adds or changes."""
    new = [str(p.relative_to(patch / "new")) for p in patch.glob("new/tests/**/test_*.py")]
    files = (edit.file for edit in read_edits(patch / "edits.yaml"))
    flat = [f for file in files for f in ([file] if isinstance(file, str) else file)]
    return sorted({*new, *(f for f in flat if Path(f).name.startswith("test_"))})


def run_tests(tree: Path, *files: str) -> dict[str, bool]:
    """Whether each test passed; a file that cannot be imported counts as a test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "tests.xml"
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--junitxml={record}"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *files],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not record.exists():
            raise SystemExit(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = {}
        for case in ElementTree.parse(record).iter("testcase"):
            outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
            if outcomes != {"skipped"}:
                found[f"{case.get('classname')}::{case.get('name')}"] = not outcomes
        return found


def in_file(test: str, file: str) -> bool:
    """Whether a test, or the failed import of its module, is of ``file``."""
    module = file.removesuffix(".py").replace("/", ".")
    return test.startswith(f"{module}::") or test == f"::{module}"


def only_tests(tree: Path, mails: dict[str, str]) -> None:
    """Applies of each patch what it changes below ``tests``."""
    for mail in mails.values():
        arguments = ["git", "apply", "--include=tests/*", "--exclude=*"]
        subprocess.run(arguments, cwd=tree, input=mail, text=True, check=True)


def check(onto: Path, report: Report, quick: bool, *only: str) -> None:
    """Runs all checks."""
    mails, lost = make(onto, *only)
    report(f"{len(mails)} of {len(patches(*only))} patches are made", lost)
    alone = {patch: mail for patch, mail in mails.items() if only or patch.startswith("fixes/")}
    with clone(onto) as tree, tempfile.TemporaryDirectory() as other:
        base = git(tree, "rev-parse", "HEAD").strip()
        for patch, mail in alone.items():
            report(f"git am, alone: {patch}", applied(tree, [mail]))
            git(tree, "reset", "-q", "--hard", base)
        report("git am, whole series", applied(tree, mails.values()))
        files = changed(tree, base)
        before = fresh_clone(onto, Path(other) / "solo-learn")
        known = [file for file in files if (before / file).exists()]
        never = unformatted(before, known) if known else set()
        report(
            f"black {BASE['black']}: {len(files) - len(never)} files",
            sorted(unformatted(tree, [f for f in files if f not in never])),
        )
        if not quick:
            check_tests(before, tree, report, mails)
    if not quick:
        for patch, mail in alone.items():
            check_alone(onto, report, patch, mail)


def check_tests(before: Path, after: Path, report: Report, mails: dict[str, str]) -> None:
    """Compares the tests of the checkout and of the patched tree."""
    only_tests(before, mails)
    without, with_them = run_tests(before, "tests"), run_tests(after, "tests")
    print(f"        {sum(without.values())} of {len(without)} tests pass without the patches")
    print(f"        {sum(with_them.values())} of {len(with_them)} tests pass with them")
    report(
        "tests that passed before still pass",
        [test for test, passed in without.items() if passed and not with_them.get(test)],
    )
    for patch in (p for p in patches() if name(p) in mails):
        problems = []
        for file in (tests := tests_of(patch)):
            if all(passed for test, passed in without.items() if in_file(test, file)):
                problems.append(f"{file} does not fail without the patches")
            found = {test: passed for test, passed in with_them.items() if in_file(test, file)}
            problems += [f"{test} fails with the patches" for test, ok in found.items() if not ok]
            if not found:
                problems.append(f"{file} runs no test with the patches")
        report(f"tests: {name(patch)}", problems if tests else ["it has no test"])


def check_alone(onto: Path, report: Report, patch: str, mail: str) -> None:
    """Runs the tests of a patch with that patch alone."""
    tests = tests_of(HERE / patch)
    with clone(onto) as tree:
        if not tests or applied(tree, [mail]):
            return
        found = run_tests(tree, *tests)
        failed = [test for test, passed in found.items() if not passed]
        report(f"tests, alone: {patch}", failed if found else ["no test ran"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--onto", type=Path, required=True, help="a checkout of solo-learn")
    parser.add_argument("--only", action="append", default=[], help="beginning of a patch's name")
    parser.add_argument("--quick", action="store_true", help="run no tests")
    given = parser.parse_args()
    report = Report()
    check(given.onto, report, given.quick, *given.only)
    print(f"{report.failed} checks failed" if report.failed else "all checks passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
