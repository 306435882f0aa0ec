"""Several protocols by one command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import locked
from solo_ext.lab.evaluation import suite
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Row
from solo_ext.lab.evaluation.suite import _render_suite, evaluate_suite, read_suite_settings

QUICK: dict[str, Any] = {
    "protocols": ["knn", "geometry"],
    "knn": {"k": [1, 3], "temperature": [0.1]},
}


@pytest.fixture(name="run")
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["features"]))


def read(run: Path) -> tuple[dict[str, Any], str]:
    record = json.loads((run / "eval_suite.json").read_text())
    return record, (run / "eval_suite.html").read_text()


def test_entries_are_those_of_single_calls(run: Path) -> None:
    small = {"protocols": ["knn", "neighbors"], "neighbors": {"queries": 2, "k": 2}}
    record = evaluate_suite(run, {**QUICK, **small})
    single = evaluate(run, "knn", QUICK["knn"])
    assert [e["protocol"] for e in record["entries"]] == ["knn", "neighbors"]
    first, second = record["entries"]
    assert first["results"] == single["results"]
    assert first["settings"] == single["settings"]
    assert first["headline"] == {"acc1": single["results"][0]["acc1"]}
    assert record["checkpoint_sha256"] == single["checkpoint_sha256"]
    assert record["failed"] == []
    written, page = read(run)
    assert written == record
    assert "Weighted cosine kNN" in page
    assert "data:image/png" in page
    assert (run / "eval_suite" / second["results"][0]["picture"]).is_file()


def test_by_default_all_that_neither_train_nor_need_settings() -> None:
    _, chosen = read_suite_settings({})
    left_out = ("linear_augmented", "finetune", "transfer")
    assert list(chosen) == [name for name in PROTOCOLS if name not in left_out]
    _, told = read_suite_settings({"protocols": ["finetune", "knn"], "finetune": {"epochs": 3}})
    assert list(told) == ["knn", "finetune"]
    assert told["finetune"].model_dump()["epochs"] == 3


@pytest.mark.fault
def test_process_that_only_helps_never_fails_the_others(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is the first process's to report; without files nothing is shared."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    broken = tmp_path / "val"
    shutil.copytree(images, broken)
    (broken / "0" / "0.png").write_bytes(b"")
    extracted: list[Any] = []
    original = EvalContext.loader

    def loader(self: EvalContext, part: Any) -> Any:
        extracted.append(part)
        return original(self, part)

    monkeypatch.setattr(EvalContext, "loader", loader)
    given = {**QUICK, "data": {"val_path": str(broken)}}
    for rank, failed in ((1, []), (0, ["knn", "geometry"])):
        monkeypatch.setenv("RANK", str(rank))
        assert evaluate_suite(run, given)["failed"] == failed
    assert extracted
    extracted.clear()
    monkeypatch.setenv("RANK", "1")
    given["data"]["unreadable"] = "skip"
    assert evaluate_suite(run, given)["entries"] == []
    assert evaluate_suite(run, {"protocols": ["neighbors"]})["entries"] == []
    assert extracted == []


class Broken(FeatureProtocol):
    """Fails."""

    title: ClassVar[str] = "Broken"

    def measure(self, features: Features) -> list[Row]:
        raise RuntimeError("not today\nsecond line")


@pytest.mark.fault
def test_failure_leaves_the_others_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROTOCOLS, "broken", Broken)
    record = evaluate_suite(run, {**QUICK, "protocols": ["broken", "knn"]})
    assert [e["status"] for e in record["entries"]] == ["done", "failed"]
    assert record["failed"] == ["broken"]
    assert record["entries"][1]["error"] == "RuntimeError: not today"
    # It stays in the record, but is no failure of the next call.
    record = evaluate_suite(run, {**QUICK, "protocols": ["knn"]})
    assert [e["status"] for e in record["entries"]] == ["done", "failed"]
    assert record["failed"] == []


@pytest.mark.fault
def test_features_that_cannot_be_had_are_tried_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        tried.append(args)
        raise ValueError("5 rows are not finite")

    tried: list[Any] = []
    monkeypatch.setattr(EvalContext, "_features", broken)
    record = evaluate_suite(run, QUICK)
    assert len(tried) == 1
    assert [e["error"] for e in record["entries"]] == 2 * ["ValueError: 5 rows are not finite"]


def test_features_are_extracted_once_where_they_are_not_stored(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spy(self: EvalContext, split: str, images: Any) -> Any:
        asked.append(split)
        return extract(self, split, images)

    asked: list[str] = []
    extract = EvalContext._features
    monkeypatch.setattr(EvalContext, "_features", spy)
    monkeypatch.setattr("solo_ext.lab.evaluation.context.images_fingerprint", lambda _: None)
    small = {"neighbors": {"queries": 2, "k": 2}, "map": {"methods": ["pca"]}}
    record = evaluate_suite(run, {**QUICK, **small, "protocols": ["knn", "neighbors", "map"]})
    assert record["failed"] == []
    assert asked == ["train", "val"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the protocols that the suite measures, as it goes on."""

    def spy(protocol: Any, context: EvalContext) -> list[Row]:
        names.append(type(protocol).__name__)
        return measure(protocol, context)

    names: list[str] = []
    measure = suite.measure
    monkeypatch.setattr(suite, "measure", spy)
    return names


def test_measured_once(run: Path, asked: list[str]) -> None:
    first = evaluate_suite(run, QUICK)
    assert asked == ["KNN", "Geometry"]
    assert evaluate_suite(run, QUICK) == first
    assert len(asked) == 2
    evaluate_suite(run, {**QUICK, "knn": {"k": [2]}})
    assert asked[2:] == ["KNN"]
    # What the call does not name stays in the record.
    record = evaluate_suite(run, {"protocols": ["retrieval"]})
    assert [e["protocol"] for e in record["entries"]] == ["knn", "retrieval", "geometry"]
    assert asked[3:] == ["Retrieval"]
    other = evaluate_suite(run, {**QUICK, "crop_size": 32})
    assert asked[4:] == ["KNN", "Geometry"]
    assert [e["protocol"] for e in other["entries"]] == ["knn", "geometry"]


@pytest.mark.fault
def test_measured_again_when_images_change_or_files_are_lost(
    run: Path, images: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``transfer``, whose images are not the run's and whose files lie in folders of its own."""
    other = Path(shutil.copytree(images, tmp_path / "other"))
    small = {"queries": 2, "k": 2}
    transfer = {
        "datasets": {"other": {"train_path": str(other), "val_path": str(other)}},
        "protocols": ["neighbors"],
        "settings": {"neighbors": small},
    }
    settings = {"protocols": ["transfer"], "transfer": transfer}
    (before,) = evaluate_suite(run, settings)["entries"]
    assert before["results"][0]["files"] == ["transfer/other/neighbors.png"]
    picture = run / "eval_suite" / "transfer" / "other" / "neighbors.png"
    # A single call writes under the same names, elsewhere.
    evaluate(run, "transfer", transfer)
    assert evaluate_suite(run, settings)["entries"] == [before]
    assert asked == ["Transfer"]
    picture.unlink()
    evaluate_suite(run, settings)
    assert picture.is_file()
    for file in sorted(other.rglob("*.png"))[::4]:
        file.unlink()
    (after,) = evaluate_suite(run, settings)["entries"]
    assert (before["results"][0]["train"], after["results"][0]["train"]) == (48, 36)
    assert len(asked) == 3
    # Images that nothing tells apart are measured every time.
    monkeypatch.setattr("solo_ext.lab.evaluation.context.images_fingerprint", lambda _: None)
    for expected in (4, 5):
        evaluate_suite(run, settings)
        assert len(asked) == expected


def test_calls_at_once_share_the_record(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins and ends while another measures, and none while another writes."""

    def with_another(protocol: Any, context: EvalContext) -> list[Row]:
        monkeypatch.setattr(suite, "measure", measure)
        evaluate_suite(run, {"protocols": ["geometry"]})
        return measure(protocol, context)

    def alone(*words: Any) -> None:
        lock = locked(run / ".eval_suite.json.lock", 0)
        with pytest.raises(UserError, match="being written by another process"), lock:
            pass
        write_text(*words)

    measure, write_text = suite.measure, suite.write_text
    monkeypatch.setattr(suite, "measure", with_another)
    monkeypatch.setattr(suite, "write_text", alone)
    record = evaluate_suite(run, {"protocols": ["knn"]})
    assert [e["protocol"] for e in record["entries"]] == ["knn", "geometry"]
    assert read(run)[0] == record


@pytest.mark.fault
@pytest.mark.parametrize("text", ["[]", "{"])
def test_damaged_record_is_begun_again(text: str, run: Path) -> None:
    (run / "eval_suite.json").write_text(text)
    assert len(evaluate_suite(run, QUICK)["entries"]) == 2


@pytest.mark.fault
def test_damaged_entry_is_measured_again(run: Path) -> None:
    whole = evaluate_suite(run, QUICK)["entries"]
    for change in ({"status": None}, {"results": 3}, {"headline": None}, {"status": "failed"}):
        record = read(run)[0]
        record["entries"][0] |= change
        (run / "eval_suite.json").write_text(json.dumps(record))
        again = evaluate_suite(run, QUICK)["entries"]
        assert [e["results"] for e in again] == [e["results"] for e in whole]


@pytest.mark.fault
@pytest.mark.parametrize("below", ["", "sub"])
def test_folder_that_cannot_be_written_is_found_at_once(
    below: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(suite, "measure", none)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="give a folder that can be written"):
        evaluate_suite(run, {**QUICK, "out": str(file / below)})


@pytest.mark.fault
def test_stopped_suite_keeps_what_is_done(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PROTOCOLS["geometry"], "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate_suite(run, QUICK)
    record, page = read(run)
    assert [e["protocol"] for e in record["entries"]] == ["knn"]
    assert "</html>" in page


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a/b.png", "link.png", "x.svg"])
def test_pictures_of_other_folders_are_not_shown(name: str, run: Path, tmp_path: Path) -> None:
    """A record may come from someone else."""
    record, folder = evaluate_suite(run, {"protocols": ["geometry"]}), tmp_path / "pictures"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path / "secret.png", folder / "a" / "b.png", folder / "x.svg"):
        place.write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    entry = {**record["entries"][0], "results": [{"picture": name}]}
    page = _render_suite({**record, "entries": [entry]}, folder)
    assert f"no picture {name}" in page
    assert "<img" not in page
