"""``python -m benchmarks.footprint``: writes the tables of ``docs/distributed.md``.

With ``--check`` it fails where they are not what the formulas say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.footprint.tables import BEGIN, END, document
from solo_ext.core.files import write_text

DOCS = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = args.docs.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{args.docs}: needs a line {BEGIN!r}, and {END!r} after it", file=sys.stderr)
        return 2
    wanted = f"{before}{BEGIN}\n\n{document()}\n\n{END}{after}"
    if text == wanted:
        return 0
    if args.check:
        command = "python -m benchmarks.footprint"
        print(f"{args.docs}: not what the formulas say; run {command}", file=sys.stderr)
        return 1
    write_text(args.docs, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
