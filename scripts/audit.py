"""Asks PyPI's advisories for every version of requirements.lock, where there is a network.

python scripts/audit.py                  # the versions that were tested
python scripts/audit.py --installed      # those of this environment
python scripts/audit.py -s osv           # asks osv.dev

Exit code 0: every version was looked up and none has an advisory. 1: there is one, named above.
2: versions could not be looked up; pip-audit itself passes over them. No part of .ci/run, which has
no more network than a package index. Needs uv, or pip-audit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs pip-audit and reads its findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("-s", "--service", choices=("pypi", "osv"), default="pypi")
    args = parser.parse_args()
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
