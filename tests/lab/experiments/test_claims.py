"""When a hypothesis was written, and what it is worth when that was late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from solo_ext.lab.experiments import records
from solo_ext.lab.experiments.launchers import Launcher, Outcome
from solo_ext.lab.experiments.records import CLAIMS, note_claims, times_written
from solo_ext.lab.experiments.results import Results, read_results
from solo_ext.lab.experiments.run import run_benchmark
from solo_ext.lab.experiments.verdicts import verdicts
from tests.lab.experiments.report_records import rows_of, settings, write_folder

SCORES = {"a": [45.0, 47.2, 46.1], "b": [40.0, 42.0, 41.0]}
"""Of seeds that finished on the 2nd, 3rd and 4th of March 2026, at 10."""


def made(**given: Any) -> Any:
    base = {"claim": "a is better", "source": "a paper", "row": "a", "base": "b", "measure": "knn"}
    return settings(hypotheses={"h": {**base, "seeds": 3, **given}})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / CLAIMS).read_text().splitlines()]


def noted_on(folder: Path, settings: Any, written: str) -> None:
    """As if that had been its time."""
    note_claims(settings, folder)
    kept = [line | {"written": written} for line in lines(folder)]
    (folder / CLAIMS).write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def test_a_line_for_what_decides_and_none_for_words(tmp_path: Path) -> None:
    note_claims(made(), tmp_path)
    note_claims(made(), tmp_path)
    note_claims(made(note="a small data set", claim="a is the better one"), tmp_path)
    note_claims(made(margin=0), tmp_path)
    assert [line["name"] for line in lines(tmp_path)] == ["h"]
    note_claims(made(direction="below"), tmp_path)
    assert [line["hypothesis"]["direction"] for line in lines(tmp_path)] == ["above", "below"]


def test_a_changed_hypothesis_has_a_new_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(made(), tmp_path)
    assert times_written(made(), tmp_path) == {"h": lines(tmp_path)[0]["written"]}
    # Settings that were edited since are not those that were noted.
    assert times_written(made(measure="linear"), tmp_path) == {}
    monkeypatch.setattr(records, "datetime", _Later)
    note_claims(made(measure="linear"), tmp_path)
    note_claims(made(), tmp_path)
    assert times_written(made(), tmp_path) == {"h": "2999-01-01T00:00:00+00:00"}


def test_it_is_noted_before_anything_is_started(tmp_path: Path) -> None:
    class Looks(Launcher):
        def run(self, *_: Any) -> list[Outcome]:
            assert [line["name"] for line in lines(tmp_path)] == ["h"]
            return [Outcome(tmp_path, "seen")]

    assert run_benchmark(made(), [], tmp_path, Looks()).failed


class _Later(records.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2999, 1, 1, tzinfo=tz)


@pytest.mark.parametrize(
    ("written", "known"), [("2026-03-01T10:00:00+00:00", 0), ("2026-03-02T12:00:00+02:00", 2)]
)
def test_written_when_runs_were_known(written: str, known: int) -> None:
    (found,) = verdicts(Results(made(), rows_of(SCORES), {"h": written}))
    assert found.answer == ("undecided" if known else "reproduced")
    assert found.reason == (f"{known} of its runs were known when it was written" * bool(known))


def test_settings_that_are_edited_after_the_runs(tmp_path: Path) -> None:
    """Which only the report reads: nothing was noted of the hypothesis as it is now."""
    write_folder(tmp_path, made(direction="below"), rows_of(SCORES))
    noted_on(tmp_path, made(direction="below"), "2026-03-01T00:00:00+00:00")
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("contradicted", "")
    write_folder(tmp_path, made(note="Seen."), rows_of(SCORES))
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("undecided", "it was not noted before its runs")
    noted_on(tmp_path, made(), "2026-03-01T00:00:00+00:00")
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("reproduced", "")
    (tmp_path / CLAIMS).unlink()
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("undecided", "it was not noted before its runs")
