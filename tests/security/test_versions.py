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

from solo_ext.lab.cli import doctor
from solo_ext.lab.cli.doctor import diagnose, show, unmet
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import CONFIG

ROOT = Path(__file__).resolve().parents[2]


WITHOUT_DEFECT = {
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "torch": "2.10",
    "pillow": "12.1.1",
    "filelock": "3.20.3",
    "tqdm": "4.66.3",
    "scikit-learn": "1.5",
}
"""The first versions without the defects that docs/security.md lists."""


@pytest.mark.parametrize("name", WITHOUT_DEFECT)
def test_no_floor_lets_a_known_defect_in(name: str) -> None:
    """Of what an installation asks for, and of what takes its place in uv's resolution."""
    assert Version(audit().floors()[name]) >= Version(WITHOUT_DEFECT[name])


def test_floors_are_those_of_every_requirement() -> None:
    """The lowest of several, without one that nothing bounds from below."""
    floors = audit().floors()
    assert floors["torchmetrics"] == "1.4"
    assert {"torch", "pillow", "h5py", "datasets", "submitit"} <= floors.keys()


def test_doctor_names_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose()
    assert found["unmet"] == []
    held = {"torch": "2.9.1+cu128", "lightning": "2.6.6", "tqdm": None}
    monkeypatch.setattr(doctor, "package_version", held.get)
    lines = unmet(["torch>=2.10", "lightning>=2.6.6,<2.7", "tqdm>=4", "h5py; extra == 'h5'"])
    assert lines == [
        "torch 2.9.1+cu128: not torch>=2.10; pip install --upgrade 'torch>=2.10'",
        "tqdm is missing: not tqdm>=4; pip install --upgrade 'tqdm>=4'",
    ]
    console = Console(record=True, width=500)
    show({**found, "unmet": lines}, console)
    assert "DANGER       torch 2.9.1+cu128: not torch>=2.10" in console.export_text()


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
