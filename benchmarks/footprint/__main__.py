"""``python -m benchmarks.footprint``: writes the tables of two pages of ``docs``.

With ``--check`` it fails where they are not what the formulas say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.footprint.tables import BEGIN, END, document, scale
from solo_ext.core.files import write_text

PAGES = Path(__file__).resolve().parents[2] / "docs"
DOCS, SCALE = PAGES / "project" / "memory.md", PAGES / "guides" / "scale.md"


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--scale", type=Path, default=SCALE)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    return max(
        _written(args.docs, document(), args.check), _written(args.scale, scale(), args.check)
    )


def _written(page: Path, tables: str, check: bool) -> int:
    """Writes the tables into a page, or compares them with it; returns the exit code."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{page}: needs a line {BEGIN!r}, and {END!r} after it", file=sys.stderr)
        return 2
    wanted = f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
    if text == wanted:
        return 0
    if check:
        command = "python -m benchmarks.footprint"
        print(f"{page}: not what the formulas say; run {command}", file=sys.stderr)
        return 1
    write_text(page, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
