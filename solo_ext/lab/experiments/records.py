"""The files of a benchmark's folder: records of runs, and when each hypothesis was written.

``records.jsonl`` has one line for each finished run, ``hypotheses.jsonl`` one for each hypothesis
that is new or changed, ``benchmark.yaml`` the settings. ``unfinished.jsonl`` has a line for each
run that has begun and not ended: which one, and how many of its epochs it has trained.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from solo_ext import __version__
from solo_ext.config.check import validated
from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, first_problem, read_jsonl, read_text
from solo_ext.lab.experiments.settings import BenchmarkSettings, Hypothesis

RECORDS, SETTINGS, CLAIMS = "records.jsonl", "benchmark.yaml", "hypotheses.jsonl"
UNFINISHED = "unfinished.jsonl"
Kind = Literal["plugin", "host", "baseline", "teacher"]


class Curves(TypedDict):
    """Measurements during training, one value for each entry of ``epochs`` (0: before training).

    >>> Curves(epochs=[0, 10], seconds=[0.0, 42.0], scores={"knn": [37.5, 87.5]})["epochs"]
    [0, 10]
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
        config: the config that was run, with defaults filled in.
        evaluation: settings of the suite, by protocol; null: defaults.
        code: from :func:`code_version`.
        environment: as in a run directory: host, packages, processor, GPUs, of the last start.
        seconds: of training, without evaluations; null for baselines, like the next two, and for
            runs that were not timed throughout.
        memory: peaks of the training process in bytes: ``resident``, ``cuda``.
        scores: in percent (also NMI and the like), after the last epoch.
        curves: null without ``online_eval``.
        finished: UTC time, ISO 8601.

    >>> record: Record = {"row": "pcl", "seed": 1, "scores": {"knn": 87.5}}
    >>> record["scores"]
    {'knn': 87.5}
    """

    key: str
    dataset: str
    budget: str
    row: str
    kind: Kind
    seed: int
    config: dict[str, Any]
    evaluation: dict[str, Any]
    threads: int
    code: dict[str, Any]
    environment: dict[str, Any]
    epochs: int
    images: int
    seconds: float | None
    images_per_second: float | None
    memory: dict[str, int | None] | None
    scores: dict[str, float]
    curves: Curves | None
    finished: str


_RECORD = TypeAdapter(Record)
_MOST_BYTES = 4 << 30
"""Largest size of a file of records; a run takes about four thousand bytes."""


def settings_in(folder: Path) -> BenchmarkSettings:
    """The settings of the benchmark that a folder holds.

    Raises:
        UserError: the folder has none, or their file is no mapping.
        ConfigError: invalid settings.

    >>> settings_in(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: 'nowhere': no benchmark.yaml with settings in it; give a ...
    """
    file = folder / SETTINGS
    given = read_yaml(file) if file.is_file() else None
    if not isinstance(given, Mapping):
        raise UserError(
            f"{str(folder)!r}: no {SETTINGS} with settings in it; give a folder that "
            "`solo-ext benchmark run` wrote"
        )
    return validated(BenchmarkSettings, given)


def read_records(folder: Path) -> list[Record]:
    """Reads the records of a folder, the last one of each key; skips an incomplete last line.

    Raises:
        UserError: the folder has no records, or a line is not a record.

    >>> read_records(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: records 'nowhere': no records.jsonl in it; give a ...
    """
    file = folder / RECORDS
    if not file.is_file():
        raise UserError(
            f"records {str(folder)!r}: no {RECORDS} in it; give a folder that "
            "`solo-ext benchmark run` wrote"
        )
    found: dict[str, Record] = {}
    lines = read_text(file, most=_MOST_BYTES).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = _RECORD.validate_json(line)
        except ValidationError as error:
            if number == len(lines) and not line.endswith("\n"):
                continue
            why = f"not a record of a run ({first_problem(error)}); remove the line"
            raise UserError(f"{file}, line {number}: {why}") from None
        found[record["key"]] = record
    return list(found.values())


def code_version() -> dict[str, Any]:
    """``version``; in a git checkout also ``commit``, and ``changed`` if files differ from that.

    A copy without git takes both from ``SOLO_EXT_COMMIT``: the commit, or ``<commit> changed``.

    >>> code_version()["version"] == __version__
    True
    """
    root = Path(__file__).resolve().parents[3]
    found: dict[str, Any] = {"version": __version__}
    if not (root / ".git").exists():
        commit, _, changed = os.environ.get("SOLO_EXT_COMMIT", "").partition(" ")
        return {**found, "commit": commit, "changed": bool(changed)} if commit else found

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "solo_ext", "configs")
        return {**found, "commit": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return found


def note_hypotheses(settings: BenchmarkSettings, folder: Path) -> None:
    """Appends a line for every hypothesis that is new or changed, before any run is started.

    A line has the name, the hypothesis and the time (UTC).

    >>> import tempfile
    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> settings, folder = read_benchmark("claims_e2"), Path(tempfile.mkdtemp())
    >>> note_hypotheses(settings, folder)
    >>> times_written(settings, folder).keys() == settings.hypotheses.keys()
    True
    """
    known = times_written(settings, folder)
    written = datetime.now(UTC).isoformat(timespec="seconds")
    lines = [
        {"name": name, "hypothesis": hypothesis.model_dump(exclude={"note"}), "written": written}
        for name, hypothesis in settings.hypotheses.items()
        if name not in known
    ]
    if lines:
        append_lines(folder / CLAIMS, lines)


def times_written(settings: BenchmarkSettings, folder: Path) -> dict[str, str]:
    """When each hypothesis was last changed; omits one whose current form was never noted.

    Other words of a claim are no change. Narrowing ``isolates`` is none either, because fewer
    comparisons then decide, but widening it is one.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> times_written(read_benchmark("claims_e2"), Path("nowhere"))
    {}
    """
    last = {line.get("name"): line for line in read_jsonl(folder / CLAIMS)}
    return {
        name: str(last[name]["written"])
        for name, hypothesis in settings.hypotheses.items()
        if name in last and _is_noted(hypothesis, last[name].get("hypothesis") or {})
    }


def _is_noted(hypothesis: Hypothesis, noted: Mapping[str, Any]) -> bool:
    before, now = noted.get("isolates"), hypothesis.isolates
    if before is not None and (now is None or not set(now) <= set(before)):
        return False
    words = {"claim", "source", "expected", "note", "isolates"}
    return hypothesis.model_dump(exclude=words).items() <= noted.items()
