"""Writes the table of results of README.md from the records of benchmarks.

python scripts/update_readme.py            # all of results that have settings
python scripts/update_readme.py --check    # fails when README.md is not what the records say
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from solo_ext.core.errors import UserError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.records import SETTINGS
from solo_ext.lab.experiments.reporting.readme import readme_table, updated

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    found = sorted(file.parent for file in (ROOT / "results").rglob(SETTINGS))
    folders = args.folders or found
    try:
        if not folders:
            raise UserError(f"no {SETTINGS} in {ROOT / 'results'}; name folders")
        text = args.readme.read_text()
        wanted = updated(text, readme_table(folders, args.readme.parent))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if text == wanted:
        return 0
    if args.check:
        print(
            f"{args.readme}: not what the records say; run {Path(__file__).name}", file=sys.stderr
        )
        return 1
    write_text(args.readme, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
