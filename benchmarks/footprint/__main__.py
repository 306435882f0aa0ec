"""``python -m benchmarks.footprint``: writes the tables of two pages of ``docs``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.footprint.tables import BEGIN, END, document, scale
from solo_ext.core.files import write_text

PAGES = Path(__file__).resolve().parents[2] / "docs"
DOCS, SCALE = PAGES / "project" / "memory.md", PAGES / "guides" / "scale.md"


def updated(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"a page needs one line {BEGIN!r}, and one {END!r} after it"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    for page, tables in ((DOCS, document()), (SCALE, scale())):
        write_text(page, updated(page.read_text(), tables))
