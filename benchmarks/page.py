"""What the records decide: the tables beside them, and a block of the documentation's page.

python -m benchmarks.page
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import Finding, Record, Verdict, table
from benchmarks.rows import ROWS
from solo_ext.core.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "speed"
PAGE = ROOT / "docs" / "benchmarks" / "speed.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
VERDICTS: tuple[Verdict, ...] = ("met", "within the gate", "missed")


def files() -> dict[Path, str]:
    """Each file as the records have it."""
    records = [Record(RESULTS / f"{device}.jsonl") for device in ("cpu", "cuda")]
    tables = {r.file.with_suffix(".md"): table(r.everything()) for r in records}
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} needs one line {BEGIN!r}, and one {END!r} after it"
    return {**tables, PAGE: f"{before}{BEGIN}\n{_block(*records)}{END}{after}"}


def _block(cpu: Record, cuda: Record) -> str:
    lines: list[Sequence[str]] = [
        ("row", "CPU: times as fast", "targets", "H200: times as fast", "targets"),
        ("---",) * 5,
    ]
    for row in ROWS:
        cells = *_cells(cpu.findings(row)), *_cells(cuda.findings(row))
        if any(cells):
            lines.append((f"`{row}`", *cells))
    totals = [cell for r in (cpu, cuda) for cell in ("", _counts(r.everything()))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (*lines, ("all", *totals)))


def _cells(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Least and largest ratio of the peers' times to ours, and how many have each verdict."""
    timed = [f for f in findings if f.again is not None]
    times = [f.measured for f in timed if f.measured is not None]
    # Steps and epochs are compared the other way round.
    if not times or any(f.target is not None and f.target.sense == "at_most" for f in timed):
        return "", _counts(findings)
    low, high = f"{min(times):.3g}", f"{max(times):.3g}"
    return low if low == high else f"{low}–{high}", _counts(findings)


def _counts(findings: Sequence[Finding]) -> str:
    verdicts = Counter(f.verdict for f in findings)
    return ", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if verdicts[v])


if __name__ == "__main__":
    for file, text in files().items():
        write_text(file, text)
