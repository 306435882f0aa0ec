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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from solo_ext import __version__
from solo_ext.config.check import validated
from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import ConfigError, UserError
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


def _with_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time with its zone, as 2026-05-01T00:00:00+00:00")
    return text


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
    finished: Annotated[str, AfterValidator(_with_zone)]


_RECORD = TypeAdapter(Record)
_MOST_BYTES = 4 << 30
"""Largest size of a file of records; a run takes about four thousand bytes."""


def settings_in(folder: Path) -> BenchmarkSettings:
    """The settings of the benchmark that a folder holds.

    Raises:
        UserError: the folder has none, their file is no mapping, or they are invalid.

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
    try:
        return validated(BenchmarkSettings, given)
    except ConfigError as error:
        # Say that the mistake is in this file, and not in the one that the user has named.
        raise UserError(f"{str(file)!r}: {error}") from None


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

    A line has the name, the hypothesis, what its two rows train, and the time (UTC).

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
        {
            "name": name,
            "hypothesis": hypothesis.model_dump(exclude={"note"}),
            "rows": _trained(settings, hypothesis),
            "written": written,
        }
        for name, hypothesis in settings.hypotheses.items()
        if name not in known
    ]
    if lines:
        append_lines(folder / CLAIMS, lines)


def times_written(settings: BenchmarkSettings, folder: Path) -> dict[str, str]:
    """When each hypothesis was last changed; omits one whose current form was never noted.

    Other words of a claim are no change. Narrowing ``isolates`` is none either, because fewer
    comparisons then decide, but widening it is one. So is another config or setting of a row.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> times_written(read_benchmark("claims_e2"), Path("nowhere"))
    {}
    """
    last = {line["name"]: line for line in read_jsonl(folder / CLAIMS) if _is_note(line)}
    return {
        name: last[name]["written"]
        for name, hypothesis in settings.hypotheses.items()
        if name in last and _is_noted(settings, hypothesis, last[name])
    }


def _is_note(line: Mapping[str, Any]) -> bool:
    """Whether a line has the form that :func:`note_hypotheses` writes; others are passed over."""
    kinds = {"name": str, "hypothesis": dict, "written": str}
    if not all(isinstance(line.get(key), kind) for key, kind in kinds.items()):
        return False
    try:
        return datetime.fromisoformat(line["written"]).tzinfo is not None
    except ValueError:
        return False


def _is_noted(settings: BenchmarkSettings, hypothesis: Hypothesis, line: Mapping[str, Any]) -> bool:
    noted, words = line["hypothesis"], {"claim", "source", "expected", "note", "isolates"}
    before, now = noted.get("isolates"), hypothesis.isolates
    if before is not None:
        allowed = tuple(f"{key}." for key in before)
        if now is None or not all(f"{key}.".startswith(allowed) for key in now):
            return False
    # Lines of earlier versions do not say what the rows train.
    trained = _trained(settings, hypothesis)
    same = line.get("rows", trained) == trained
    return bool(same) and hypothesis.model_dump(exclude=words).items() <= noted.items()


def _trained(settings: BenchmarkSettings, hypothesis: Hypothesis) -> dict[str, Any]:
    """What the two rows of a hypothesis train, besides what all rows have."""
    rows = {name: settings.rows[name] for name in (hypothesis.row, hypothesis.base)}
    return {
        name: row.model_dump(include={"config", "changes", "baseline"})
        for name, row in rows.items()
    }
