"""When each hypothesis was written down, so that nobody need take a word for it."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from solo_ext.core.files import append_lines, read_jsonl
from solo_ext.lab.experiments.settings import BenchmarkSettings, Hypothesis

CLAIMS = "hypotheses.jsonl"


def note_claims(settings: BenchmarkSettings, folder: Path) -> None:
    """Adds a line for every hypothesis that is new or changed, before any run is started.

    A line holds the name, the digest of what decides the verdict, the hypothesis and the time
    (UTC, ISO 8601). The note, written afterwards, decides nothing.
    """
    held = {line.get("name"): line.get("digest") for line in read_jsonl(folder / CLAIMS)}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    lines = [
        {
            "name": name,
            "digest": _digest(hypothesis),
            "hypothesis": hypothesis.model_dump(exclude={"note"}),
            "written": written,
        }
        for name, hypothesis in settings.hypotheses.items()
        if held.get(name) != _digest(hypothesis)
    ]
    if lines:
        append_lines(folder / CLAIMS, lines)


def times_written(settings: BenchmarkSettings, folder: Path) -> dict[str, str]:
    """Since when each hypothesis has been as it is; those without a line are left out."""
    last = {line.get("name"): line for line in read_jsonl(folder / CLAIMS)}
    return {
        name: str(last[name]["written"])
        for name, hypothesis in settings.hypotheses.items()
        if name in last and last[name].get("digest") == _digest(hypothesis)
    }


def _digest(hypothesis: Hypothesis) -> str:
    deciding = hypothesis.model_dump(exclude={"note", "claim", "source"})
    # One that is given is a float, and is left out of the settings that a folder keeps.
    deciding["margin"] = deciding["margin"] or 0
    text = json.dumps(deciding, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
