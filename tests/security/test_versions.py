"""Versions that are known to be bad are neither asked for nor passed over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version
from rich.console import Console

from solo_ext.lab.cli.advisories import ADVISORIES, MALICIOUS, Advisory, known_bad
from solo_ext.lab.cli.doctor import diagnose, show
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import CONFIG

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda a: f"{a.package}-{a.id}")
def test_no_floor_lets_a_known_defect_in(advisory: Advisory) -> None:
    """Of what an installation asks for, and of what takes its place in uv's resolution."""
    floor = audit().floors()[advisory.package]
    assert Version(floor) >= Version(advisory.fixed), f"{advisory.package}>={floor}"


def test_no_malicious_upload_is_let_in() -> None:
    floors = audit().floors()
    assert all(Version(version) < Version(floors[name]) for name, version in MALICIOUS)


def test_floors_are_those_of_every_requirement() -> None:
    """The lowest of several, without one that nothing bounds from below."""
    floors = audit().floors()
    assert floors["torchmetrics"] == "1.4"
    assert {"torch", "pillow", "h5py", "datasets", "submitit"} <= floors.keys()


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_malicious_uploads_are_named(name: str, version: str) -> None:
    (line,) = known_bad({name: version, "torch": "2.10.0"})
    assert f"{name} {version} was a malicious upload" in line
    assert f"pip install --upgrade '{name}>=2.6.6'" in line


def test_other_versions() -> None:
    assert "GHSA-qqmf-gpg7-g8gw" in known_bad({"lightning": "2.6.5"})[0]
    (line,) = known_bad({"torch": "2.9.1"})
    assert "CVE-2026-24747" in line
    assert "pip install --upgrade 'torch>=2.10.0'" in line
    assert known_bad({"lightning": "2.6.6", "pytorch-lightning": None}) == []
    assert known_bad({"lightning": "2.10.0", "pytorch-lightning": "2.6.10"}) == []


def test_doctor_shows_them() -> None:
    found = diagnose()
    assert found["known_bad"] == []
    console = Console(record=True, width=500)
    show({**found, "known_bad": known_bad({"lightning": "2.6.3"})}, console)
    assert "DANGER       lightning 2.6.3 was a malicious upload" in console.export_text()


def test_a_checkpoint_names_nothing_to_instantiate(
    make_config: Any, package: str, tmp_path: Path
) -> None:
    """GHSA-qqmf-gpg7-g8gw: a text in ``hyper_parameters``, which is no pickled code."""
    data = {"val_path": make_config("simclr")["data"]["train_path"]}
    run = tmp_path / "run"
    config = make_config("simclr", data=data)
    pretrain(prepare(config), run_dir=run, show_progress=False)
    (file,) = run.glob("*.ckpt")
    state = torch.load(file, weights_only=True)
    named = {"_instantiator": f"{package}.call", "_class_path": f"{package}.call", "a": 1}
    state |= {
        "hyper_parameters": named,
        "hparams_name": "cfg",
        "datamodule_hyper_parameters": named,
    }
    torch.save(state, file)
    assert evaluate(str(run), "knn", {"device": "cpu", "k": [1]})["results"]
    assert (run / CONFIG).is_file()
    resume(run)


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_audit_fails_where_it_could_not_look(capsys: pytest.CaptureFixture[str]) -> None:
    """pip-audit itself ends well where it found no package at all."""
    well = {"name": "a", "version": "1", "vulns": []}
    unknown = {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    report = audit().report
    assert report([well]) == 0
    assert report([well, unknown]) == 2
    assert report([well, unknown, bad]) == 1
    out, err = capsys.readouterr()
    assert "c 2: CVE-1, mended in 3" in out
    assert "not looked up: b" in err
