"""Writes docs/benchmarks/matrix.md from the records of ``pytest -m matrix``.

python scripts/update_matrix.py    # from results/matrix/records.jsonl

It fails where a cell is missing, or failed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from solo_ext.core.files import read_jsonl, write_text

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "matrix" / "records.jsonl"
PAGE = ROOT / "docs" / "benchmarks" / "matrix.md"
CHECKS = {
    "resume at epoch": "resume at epoch",
    "resume mid-epoch": "resume mid-epoch",
    "kill -9": "kill -9 at ten moments",
    "2 processes": "2 processes",
    "4 processes": "4 processes",
    "AMP": "AMP (bf16)",
    "accumulation": "accumulation",
    "multi-crop": "multi-crop",
    "DALI": "DALI (CPU)",
}
HEAD = """# Every method by every check

This page shows which checks each method passes. The words in the tables mean:

| word | meaning |
|---|---|
| equal | the run was stopped and resumed. It ends as an uninterrupted run does, to the last bit |
| close | several processes end with the weights of one process that has the images of all of them |
| agree | several processes end with the same weights, but not with those of one (see the note) |
| refused | the command ends with an error before it trains. The note quotes the error |

- **One process.** The runs have three epochs of six steps on a CPU, with a checkpoint after each
  epoch. With AMP, accumulation, multi-crop and DALI they are stopped within the second epoch. The
  check compares weights, optimiser, schedules, state, random generators, the place in the data and
  logged metrics. A kill can come at any moment of a process, even while it starts.
- **Several processes** (gloo). Two steps without batch norm are compared with those of one process.
  In a cell "close", all processes have the same weights. They differ from the weights of the one
  process by less than a hundredth of what the steps changed. Queues, support sets, prototypes and
  assignments must be those of the one process too, if the images are put in the same order. SwAV's
  processes queue their own images, so all of their queues are compared together.
- **On a GPU.** float16 needs a GPU. On an H200 (`pytest -m gpu`) each of the nine methods of this
  package trained in float32, bfloat16 and float16. DALI gave nearly the images that it gives on a
  CPU: the mean difference is below two grey levels. NCCL was not run.

`python scripts/update_matrix.py` writes this page from the records of `pytest -m matrix` in
[results/matrix](../../results/matrix). Every test run includes a part of these checks.
"""


def page() -> str:
    """What the records say.

    Raises:
        SystemExit: a cell is missing, or failed.
    """
    records = hosts(read_jsonl(RECORDS))
    lacking = [name for record in records for name in missing(record)]
    if lacking or not records:
        raise SystemExit(f"{RECORDS} lacks {', '.join(lacking) or 'all'}; run pytest -m matrix")
    return HEAD + "".join(map(section, records))


def hosts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record of each host: its methods, cells, kills and workers; the last lines count."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        name, check = line["host"], line["check"]
        record = found.setdefault(name, {"name": name, "methods": [], "cells": {}, "workers": {}})
        if check == "methods":
            record["methods"] = line["methods"]
        elif check == "kills":
            record["kills"] = line
        elif check == "workers":
            by = record["workers"].setdefault(line["method"], {})
            by.setdefault(line["start_method"], {})[str(line["num_workers"])] = line
        else:
            record["cells"].setdefault(line["method"], {})[check] = line
    return [found[name] for name in sorted(found)]


def section(record: dict[str, Any]) -> str:
    """The table of a host, and what its words leave open."""
    notes: list[str] = []
    lines = [
        f"\n## solo-learn {record['name']}\n",
        "| method | " + " | ".join(CHECKS.values()) + " |",
        "|---|" + "---|" * len(CHECKS),
    ]
    for method in record["methods"]:
        shown = [_cell(record["cells"][method][check], notes) for check in CHECKS]
        lines.append(f"| `{method}` | " + " | ".join(shown) + " |")
    found = [f"{number}. {why}" for number, why in enumerate(notes, 1)]
    kills = record["kills"]
    survived = (
        f"A run of PCL on digits was killed (`kill -9`) at {kills['number']} moments and resumed "
        "each time. It ended with the weights, state and log of an uninterrupted run "
        f"({kills['how']}; {_versions(kills)})."
    )
    workers = " ".join(
        f"`{method}` with {', '.join(sorted(numbers))} workers by {start_method} equals a run "
        "without workers."
        for method, by in record["workers"].items()
        for start_method, numbers in by.items()
    )
    end = [
        "",
        *found,
        *([""] if found else []),
        _made_with(record["cells"]),
        "",
        survived,
        "",
        workers,
        "",
    ]
    return "\n".join([*lines, *end])


def missing(record: dict[str, Any]) -> list[str]:
    """What a host's record lacks, or has to have otherwise."""
    lacking = [
        f"{method}, {check}"
        for method in record["methods"]
        for check in CHECKS
        if check not in record["cells"].get(method, {})
    ]
    lacking += [name for name in ("kills", "workers") if not record.get(name)]
    lacking += [
        f"{method}, {check}, which {cell['word']}"
        for method, row in record["cells"].items()
        for check, cell in row.items()
        if cell["word"] in ("failed", "not run")
    ]
    return [f"solo-learn {record['name']}, {name}" for name in lacking]


def _made_with(cells: dict[str, dict[str, Any]]) -> str:
    """What cells were made with, most of them first; which is which stands in the records."""
    counts = Counter(_versions(cell) for row in cells.values() for cell in row.values())
    return "; ".join(made for made, _ in counts.most_common()) + "."


def _versions(made: dict[str, Any]) -> str:
    code = made["code"]
    commit = code.get("commit", code["version"])[:12]
    changed = " with changes" if code.get("changed") else ""
    return (
        f"solo_ext {commit}{changed}, solo-learn's files {made['fingerprint']}, "
        f"torch {made['torch']}, Lightning {made['lightning']}, Python {made['python']}"
    )


def _cell(cell: dict[str, Any], notes: list[str]) -> str:
    if cell["word"] in ("equal", "close"):
        return str(cell["word"])
    if cell["why"] not in notes:
        notes.append(cell["why"])
    return f"{cell['word']} ({notes.index(cell['why']) + 1})"


if __name__ == "__main__":
    write_text(PAGE, page())
