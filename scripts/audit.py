"""Asks PyPI's advisories for every version of requirements.lock, where there is a network.

python scripts/audit.py                  # the versions that were tested
python scripts/audit.py --installed      # those of this environment
python scripts/audit.py --floors         # the lowest that pyproject.toml lets in
python scripts/audit.py -s osv           # asks osv.dev

Exit code 0: every version was looked up and none has an advisory. 1: there is one, named above.
2: versions could not be looked up; pip-audit itself passes over them. No part of .ci/run, which has
no more network than a package index. Needs packaging, and uv or pip-audit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs pip-audit and reads its findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--installed", action="store_true")
    which.add_argument("--floors", action="store_true")
    parser.add_argument("-s", "--service", choices=("pypi", "osv"), default="pypi")
    args = parser.parse_args()
    if args.floors:
        pins = "".join(f"{name}=={low}\n" for name, low in floors().items())
    else:
        pins = installed() if args.installed else (ROOT / "requirements.lock").read_text()
    command = shutil.which("pip-audit")
    run = [command] if command else ["uv", "tool", "run", "pip-audit"]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text(pins)
        options = ["--no-deps", "--disable-pip", "-f", "json", "-s", args.service, "-r", str(file)]
        done = subprocess.run([*run, *options], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        print(f"pip-audit reached no service ({args.service}): {said[-1]}", file=sys.stderr)
        return 2
    return report(found)


def installed() -> str:
    """Names and versions of this environment, but for the package itself."""
    found = {d.metadata["Name"]: d.version for d in distributions()}
    return "".join(f"{n}=={v}\n" for n, v in sorted(found.items()) if n != "solo-ext")


def floors() -> dict[str, str]:
    """The lowest version of every package that an installation may ask for, extras included.

    Where several requirements name a package, what takes their place in uv's resolution counts too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    asked = [*project["project"]["dependencies"], *itertools.chain(*extras)]
    found: dict[str, str] = {}
    for line in [*asked, *project["tool"]["uv"]["override-dependencies"]]:
        wanted = Requirement(line)
        low = next(s.version for s in wanted.specifier if s.operator in (">=", "=="))
        found[wanted.name] = min(found.get(wanted.name, low), low, key=Version)
    return found


def report(found: list[dict[str, Any]]) -> int:
    """Prints what was found; returns the exit code."""
    skipped = [d["name"] for d in found if "skip_reason" in d]
    bad = [d for d in found if d.get("vulns")]
    for one in bad:
        for advisory in one["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"{one['name']} {one['version']}: {advisory['id']}, mended in {fixed}")
    looked_up = len(found) - len(skipped)
    print(f"{looked_up} of {len(found)} versions looked up, {len(bad)} with advisories")
    if skipped:
        print(f"not looked up: {', '.join(skipped)}", file=sys.stderr)
    return 1 if bad else 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
