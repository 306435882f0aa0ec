"""The page that is written from the records."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "update_matrix.py"))


def test_page_is_what_the_records_say() -> None:
    assert PAGE["PAGE"].read_text() == PAGE["page"](), "run scripts/update_matrix.py"


def cell(word: str, why: str = "", commit: str = "aaaa") -> dict[str, Any]:
    versions = {"fingerprint": "1b2c", "torch": "2.15", "lightning": "2.6.6", "python": "3.11"}
    return {"word": word, "why": why, "code": {"version": "0.1", "commit": commit}, **versions}


@pytest.fixture
def record() -> dict[str, Any]:
    row = {check: cell("equal") for check in PAGE["CHECKS"]}
    cells = {"pcl": dict(row), "simclr": dict(row)}
    kills = {"number": 100, "how": "7 past a checkpoint"} | cell("equal")
    workers = {"pcl": {"spawn": {"2": cell("equal"), "1": cell("equal")}}}
    rest = {"kills": kills, "workers": workers}
    return {"name": "1.0.2", "methods": ["pcl", "simclr"], "cells": cells, **rest}


def test_every_word_but_equal_and_close_has_its_reason(record: dict[str, Any]) -> None:
    record["cells"]["pcl"] |= {"AMP": cell("refused", "how"), "2 processes": cell("agree", "why")}
    page = PAGE["section"](record)
    assert "| `pcl` | equal | equal | equal | agree (1) | equal | refused (2) |" in page
    assert "\n1. why\n2. how\n" in page


def test_cells_of_other_code_are_named(record: dict[str, Any]) -> None:
    record["cells"]["simclr"]["DALI"] = cell("equal", commit="bbbb")
    *_, made_with, _, kills, _, workers = PAGE["section"](record).splitlines()
    assert workers == "`pcl` with 1, 2 workers by spawn equals a run without workers."
    usual, others = made_with.split("; ")
    assert "100 moments" in kills
    assert "7 past a checkpoint; solo_ext aaaa," in kills
    assert usual.startswith("solo_ext aaaa, solo-learn's files 1b2c, torch 2.15")
    assert others.startswith("solo_ext bbbb,")


def test_the_last_line_of_a_cell_counts() -> None:
    cells = [
        {"host": "main", "method": "pcl", "check": "AMP", **cell(word)}
        for word in ("failed", "equal")
    ]
    workers = {"host": "main", "method": "pcl", "check": "workers"}
    numbers = [workers | {"start_method": "spawn", "num_workers": n} for n in (1, 2)]
    listed = {"host": "main", "check": "methods", "methods": ["pcl"]}
    (record,) = PAGE["hosts"]([listed, *cells, *numbers])
    assert record["cells"]["pcl"]["AMP"]["word"] == "equal"
    assert list(record["workers"]["pcl"]["spawn"]) == ["1", "2"]
    assert "solo-learn main, kills" in PAGE["missing"](record)


def test_a_lacking_cell_is_found(record: dict[str, Any]) -> None:
    assert not PAGE["missing"](record)
    record["cells"]["pcl"]["AMP"] = cell("failed", "how")
    assert PAGE["missing"](record) == ["solo-learn 1.0.2, pcl, AMP, which failed"]
    record["cells"]["pcl"]["AMP"] = cell("equal")
    del record["cells"]["simclr"]["kill -9"]
    record["methods"].append("byol")
    del record["kills"]
    lacking = PAGE["missing"](record)
    assert lacking[0] == "solo-learn 1.0.2, simclr, kill -9"
    assert lacking[1:-1] == [f"solo-learn 1.0.2, byol, {check}" for check in PAGE["CHECKS"]]
    assert lacking[-1] == "solo-learn 1.0.2, kills"
