"""The files of a benchmark's folder: records of runs, and when each hypothesis was written.

``records.jsonl`` has one line for each finished run, ``hypotheses.jsonl`` one for each hypothesis
that is new or changed, ``benchmark.yaml`` the settings.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from solo_ext import __version__
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, read_jsonl
from solo_ext.lab.experiments.settings import BenchmarkSettings, Hypothesis

RECORDS, SETTINGS, CLAIMS = "records.jsonl", "benchmark.yaml", "hypotheses.jsonl"
Kind = Literal["plugin", "host", "baseline", "teacher"]


class Memory(TypedDict):
    """Peaks of the training process in bytes; ``cuda`` is null on a CPU."""

    resident: int
    cuda: int | None


class Curves(TypedDict):
    """Measurements during training, one value for each entry of ``epochs`` (0: before training).

    ``seconds`` are of training alone; ``scores`` have the same names as those of the record.
    """

    epochs: list[int]
    seconds: list[float]
    scores: dict[str, list[float | None]]


class Record(TypedDict):
    """A finished run.

    Attributes:
        key: digest of what decides the numbers: config, names and classes of the images,
            evaluation, threads, code of the host, and the key of the teacher's run; it does not
            include the plugin's own code.
        config_digest: digest of the config alone, as in names of run directories.
        dataset: folder of configs.
        budget: name in the settings.
        row: name in the settings.
        kind: ``plugin``, ``host``, ``baseline`` or ``teacher``.
        method: name in solo-learn's registry; null for raw pixels.
        seed: of the run.
        config: the config that was run, with defaults filled in.
        evaluation: settings of the suite, by protocol; null: defaults.
        threads: CPU threads.
        code: ``version``, and in a checkout ``commit`` and ``changed``.
        environment: as in a run directory: host, packages, processor, GPUs.
        parts: number of processes that trained it in turn; more than 1 if it was resumed.
        epochs: number of epochs trained; 0 for baselines.
        images: number of training images.
        seconds: of training, without evaluations; null for baselines.
        images_per_second: over those seconds.
        memory: null for baselines.
        scores: in percent (also NMI and the like), after the last epoch.
        curves: null without ``online_eval``.
        losses: mean of every loss over each epoch, by name; null where it was not finite.
        finished: UTC time, ISO 8601.
    """

    key: str
    config_digest: str
    benchmark: str
    dataset: str
    budget: str
    row: str
    kind: Kind
    method: str | None
    seed: int
    config: dict[str, Any]
    evaluation: dict[str, Any]
    threads: int
    code: dict[str, Any]
    environment: dict[str, Any]
    parts: NotRequired[int]
    epochs: int
    images: int
    seconds: float | None
    images_per_second: float | None
    memory: Memory | None
    scores: dict[str, float]
    curves: Curves | None
    losses: NotRequired[dict[str, list[float | None]]]
    finished: str


_REQUIRED = Record.__annotations__.keys() - {"parts", "losses"}


def read_records(folder: Path) -> list[Record]:
    """Reads the records of a folder, the last one of each key; skips an incomplete last line.

    Raises:
        UserError: the folder has no records, or a line is not a record.
    """
    file = folder / RECORDS
    if not file.is_file():
        raise UserError(
            f"records {str(folder)!r}: no {RECORDS} in it; give a folder that "
            "`solo-ext benchmark run` wrote"
        )
    found: dict[str, Record] = {}
    lines = file.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            absent = _REQUIRED - record.keys()
            if absent:
                raise KeyError(min(absent))
            found[record["key"]] = record
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines) and not line.endswith("\n"):
                continue
            raise UserError(
                f"{file}, line {number}: not a record of a run; remove the line"
            ) from None
    return list(found.values())


def append_records(folder: Path, records: Iterable[Record]) -> None:
    """Appends lines; first removes an incomplete last line of a killed process."""
    append_lines(folder / RECORDS, records)


def code_version() -> dict[str, Any]:
    """``version``; in a git checkout also ``commit``, and ``changed`` if files differ from it.

    >>> code_version()["version"]
    '0.1.0'
    """
    root = Path(__file__).resolve().parents[3]
    found: dict[str, Any] = {"version": __version__}
    if not (root / ".git").exists():
        return found

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "solo_ext", "configs")
        return {**found, "commit": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return found


def note_claims(settings: BenchmarkSettings, folder: Path) -> None:
    """Appends a line for every hypothesis that is new or changed, before any run is started.

    A line contains the name, a digest of what decides the verdict, the hypothesis and the time
    (UTC, ISO 8601). The field ``note``, written afterwards, is not part of the digest.
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
    """When each hypothesis was last changed; those without a line are missing."""
    last = {line.get("name"): line for line in read_jsonl(folder / CLAIMS)}
    return {
        name: str(last[name]["written"])
        for name, hypothesis in settings.hypotheses.items()
        if name in last and last[name].get("digest") == _digest(hypothesis)
    }


def _digest(hypothesis: Hypothesis) -> str:
    deciding = hypothesis.model_dump(exclude={"note", "claim", "source"})
    # A given margin is a float, but 0 is left out of the settings that a folder stores.
    deciding["margin"] = deciding["margin"] or 0
    text = json.dumps(deciding, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
