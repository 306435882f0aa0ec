"""Versions that are known to be bad are neither asked for nor passed over."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from solo_ext.lab.cli import doctor
from solo_ext.lab.cli.doctor import diagnose, unmet

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
"""The first versions without the defects that docs/guides/untrusted-files.md lists."""


@pytest.mark.parametrize("name", WITHOUT_DEFECT)
def test_no_floor_lets_a_known_defect_in(name: str) -> None:
    """Of what an installation asks for, and of what takes its place in uv's resolution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["tool"]["uv"]["override-dependencies"]
    wanted = [r for r in map(Requirement, asked) if r.name == name]
    floors = [s.version for r in wanted for s in r.specifier if s.operator in (">=", "==")]
    assert len(floors) == len(wanted) > 0
    assert min(map(Version, floors)) >= Version(WITHOUT_DEFECT[name])


@pytest.mark.upstream
@pytest.mark.skipif("SOLO_LEARN_ROOT" not in os.environ, reason="names no checkout of main")
def test_two_pins_of_solo_learn_main_are_not_kept() -> None:
    """docs/start/install.md names them."""
    lines = (Path(os.environ["SOLO_LEARN_ROOT"]) / "requirements.txt").read_text().splitlines()
    theirs = {r.name: r.specifier for r in map(Requirement, filter(None, lines))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lost = {
        asked.name
        for asked in map(Requirement, project["dependencies"])
        for floor in asked.specifier
        if floor.operator == ">=" and floor.version not in theirs.get(asked.name, asked.specifier)
    }
    assert lost == {"lightning", "torchmetrics"}


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
    shown = list(doctor.lines({**found, "unmet": lines}))
    assert f"DANGER       {lines[0]}" in shown
