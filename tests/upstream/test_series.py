"""The patches of `upstream` as a series."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import make
import pytest

from solo_ext.host import fingerprint, patches

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "upstream"
pytestmark = pytest.mark.upstream
FIXES = [path.name for path in make.patches("fixes")]
PARTLY = {
    "0003-dali-without-validation": "dali",
    "0004-device-of-knn-and-umap": "the launcher",
    "0013-dali-on-cpu": "dali",
    "0014-dali-seed": "dali",
    "0015-stray-keys-in-configs": "solo-ext pretrain",
    "0016-val-path-of-cifar": "nothing",
    "0017-message-on-large-crops": "the launcher",
}
"""Fixes of what is no single patch of the plugin, and what of it concerns them."""


@pytest.mark.slow
def test_git_am_and_black(tree: Path) -> None:
    report = check.Report()
    check.check(tree, report, True)
    assert not report.failed


def test_base_is_the_tree_that_is_tested(tree: Path) -> None:
    if "SOLO_LEARN_ROOT" in os.environ and fingerprint(tree / "solo") != check.BASE["fingerprint"]:
        pytest.skip("SOLO_LEARN_ROOT names another commit")
    assert fingerprint(tree / "solo") == check.BASE["fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["make", "check"])
def test_a_newer_main_says_what_has_no_place(tree: Path, tmp_path: Path, program: str) -> None:
    newer, out = tmp_path / "newer", tmp_path / "out"
    shutil.copytree(tree, newer, ignore=shutil.ignore_patterns("__pycache__"))

    def changed(file: str, old: str, new: str) -> None:
        assert old in (newer / file).read_text()
        (newer / file).write_text((newer / file).read_text().replace(old, new))

    changed("solo/utils/knn.py", ", compute_on_step=False", "")
    changed("solo/methods/swav.py", "def on_train_start", "def on_fit_start")
    changed("solo/methods/base.py", "self.last_step = 0", "self.last_step = 0; self.last_step = 0")
    (newer / "solo/methods/dino.py").rename(newer / "solo/methods/dino_method.py")
    (newer / "solo/methods/mochi.py").touch()
    (newer / "solo/losses/nnclr.py").write_bytes(b"\xff")
    arguments = {"make": ["--out", out], "check": ["--quick"]}[program]
    # Of black, which the test above runs, this one asks nothing.
    black = tmp_path / "uv"
    black.write_text("#!/bin/sh\n")
    black.chmod(0o755)
    done = subprocess.run(
        [sys.executable, UPSTREAM / f"{program}.py", "--onto", newer, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    lost = [
        "fixes/0001-online-knn: solo/utils/knn.py: anchor ', compute_on_step=False' is gone",
        "fixes/0005-resume-swav: solo/methods/swav.py: anchor 'def on_train_start' is gone",
        "fixes/0010-momentum-on-resume: solo/methods/base.py: "
        "anchor 'self.last_step = 0' is there 2 times",
        "fixes/0011-dino-temperature-on-resume: solo/methods/dino.py: there is no such file",
        "methods/0002-nnclr-symmetric: solo/losses/nnclr.py: 'utf-8' codec can't decode",
        "methods/0003-mochi: solo/methods/mochi.py exists already",
    ]
    assert done.returncode == 1
    if program == "make":
        said = done.stderr.splitlines()
        made = [path.stem[:4] for path in sorted((out / "fixes").iterdir())]
        assert made == [f[:4] for f in FIXES if f[:4] not in ("0001", "0005", "0010", "0011")]
    else:
        assert not done.stderr
        first, *said = done.stdout.splitlines()
        said = [line.strip() for line in said[: len(lost)]]
        assert first.startswith("FAILED")
        assert "ok      git am, whole series" in done.stdout
        assert done.stdout.endswith("1 checks failed\n")
    assert [line[: len(start)] for line, start in zip(said, lost, strict=True)] == lost


@pytest.mark.parametrize("patch", make.patches(), ids=lambda path: path.name)
def test_a_patch_is_described(patch: Path) -> None:
    subject, empty, *body = (patch / "message").read_text().splitlines()
    assert len(subject) <= 72
    assert not empty
    assert body
    text, readme = (patch / "pull_request.md").read_text(), (UPSTREAM / "README.md").read_text()
    assert text.startswith(f"# {subject}\n")
    assert f"({patch.parent.name}/{patch.name}/pull_request.md)" in readme
    if patch.name in FIXES:
        own = (patch / "issue.md").is_file()
        assert own != bool(re.search(r"^Fixes #\d+\.$", text, re.M))
        assert not own or f"(fixes/{patch.name}/issue.md)" in readme
    assert "solo_ext" not in "".join(p.read_text() for p in patch.rglob("new/**/*.py"))


def test_every_fix_is_that_of_a_patch_of_ours() -> None:
    named = {patch.fix for patch in patches.PATCHES.values() if patch.fix}
    assert sorted([*named, *PARTLY]) == FIXES


@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_all_of_it(tree: Path) -> None:
    report = check.Report()
    check.check(tree, report, False)
    assert not report.failed
