"""Where exports are written: what is in the way, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.pretrained import export as exporting
from solo_ext.pretrained.export import Format, export
from solo_ext.pretrained.exported import load_exported

MakeRun = Callable[..., Path]


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("form", ["timm", "safetensors"])
def test_what_is_there_stays(form: Format, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    out = export(run, form).out
    held = {p: p.stat().st_mtime_ns for p in (out, *out.glob("*"))}
    # The same again is no mistake, and writes nothing.
    assert export(run, form).out == out
    assert {p: p.stat().st_mtime_ns for p in (out, *out.glob("*"))} == held
    (file,) = run.glob("*.ckpt")
    state = torch.load(file)
    torch.save({**state, "epoch": 9}, file)
    before = left(run)
    assert "is there already with other content; remove it" in refusal(lambda: export(run, form))
    assert left(run) == before
    assert load_exported(out).metadata.epoch == 7
    elsewhere = tmp_path / "elsewhere.safetensors"
    assert load_exported(export(run, form, elsewhere).out).metadata.epoch == 10


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_places_that_are_taken(kind: str, make_run: MakeRun, tmp_path: Path) -> None:
    place = tmp_path / "place.safetensors"
    if kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "config.json").write_text("mine")
    run = make_run()
    for form in ("timm", "safetensors"):
        assert "is there already" in refusal(lambda form=form: export(run, form, place))
    mine = place if kind == "file" else place / "config.json"
    assert mine.read_text() == "mine"
    assert left(tmp_path) == ["place.safetensors", "run"]


def test_places_that_are_none(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for out, says in (
        (tmp_path / "no" / "x.safetensors", f"no folder {str(tmp_path / 'no')!r}"),
        (tmp_path / "x", "let it end in .safetensors"),
    ):
        with pytest.raises(ConfigError, match="--out=") as caught:
            export(run, "safetensors", out)
        assert says in str(caught.value)
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize("form", ["timm", "safetensors"])
@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_writing_that_fails_leaves_nothing(
    form: Format, failure: BaseException, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(weights: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise failure

    run = make_run()
    before = left(run)
    monkeypatch.setattr(exporting, "save_file", half)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        export(run, form)
    if isinstance(failure, OSError):
        assert "cannot be written: no space left; choose --out" in str(caught.value)
    assert left(run) == before


def test_killed_export_is_no_hindrance(make_run: MakeRun) -> None:
    run = make_run()
    (run / ".export-timm.saving").mkdir()
    (run / ".export-timm.saving" / "model.safetensors").write_bytes(b"half")
    (run / ".backbone.safetensors.saving").write_bytes(b"half")
    for form in ("timm", "safetensors"):
        load_exported(export(run, form).out)  # type: ignore[arg-type]
    assert left(run) == ["args.json", "backbone.safetensors", "export-timm", "name-ep=6.ckpt"]
