"""In solo-learn's own scripts a built-in is what it is without the plugin."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.conftest import KWARGS, made_images
from tests.matrix.rows import BUILTIN

ROOT = os.environ.get("SOLO_LEARN_ROOT")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.upstream,
    pytest.mark.skipif(ROOT is None, reason="SOLO_LEARN_ROOT names no checkout of main"),
]
JITTER = {"prob": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
VIEW: dict[str, Any] = {
    "rrc": {"enabled": True, "crop_min_scale": 0.2, "crop_max_scale": 1.0},
    "color_jitter": JITTER,
    "grayscale": {"prob": 0.2},
    "horizontal_flip": {"prob": 0.5},
    **{name: {"prob": 0.0} for name in ("gaussian_blur", "solarization", "equalization")},
    "crop_size": 16,
    "num_crops": 2,
}


def config(method: str, images: Path, **changes: Any) -> dict[str, Any]:
    """Two epochs of two steps in upstream's schema."""
    kwargs: dict[str, Any] = {"proj_hidden_dim": 16, "proj_output_dim": 8, **KWARGS.get(method, {})}
    adamw = method in ("mae", "mocov3")
    backbone: dict[str, Any] = {"name": "resnet18"}
    if method == "mae":
        kwargs = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
    if method == "wmse":
        kwargs |= {"whitening_size": 12}
    if method in ("mae", "mocov3", "dino"):
        backbone = {"name": "vit_tiny", "kwargs": {"img_size": 16, "patch_size": 8}}
    return {
        "defaults": [
            "_self_",
            {"override hydra/hydra_logging": "disabled"},
            {"override hydra/job_logging": "disabled"},
        ],
        "hydra": {"output_subdir": None, "run": {"dir": "."}},
        "name": "tiny",
        "method": method,
        "backbone": backbone,
        "method_kwargs": kwargs,
        "momentum": {"base_tau": 0.99, "final_tau": 1.0, "classifier": False},
        "data": {
            "dataset": "custom",
            "train_path": str(images),
            "val_path": None,
            "num_workers": 0,
        },
        "augmentations": [VIEW],
        "optimizer": {
            "name": "adamw" if adamw else "lars",
            "batch_size": 12,
            "lr": 0.3,
            "classifier_lr": 0.1,
            "weight_decay": 1e-4,
            "kwargs": {} if adamw else {"clip_lr": True, "eta": 0.02, "exclude_bias_n_norm": True},
        },
        "scheduler": {"name": "warmup_cosine", "warmup_epochs": 1},
        "checkpoint": {"enabled": True, "dir": "trained_models", "frequency": 1, "keep_prev": True},
        "max_epochs": 2,
        "devices": "1",
        "accelerator": "cpu",
        "strategy": "auto",
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        **changes,
    }


class Side:
    """Runs in a folder of a checkout's script, with ``flags`` of ``upstream_runs.py``."""

    def __init__(self, folder: Path, *flags: str, root: str | None = ROOT, path: str = "") -> None:
        assert root is not None
        self.folder, self.flags, self.root = folder, flags, root
        self.path = f"{path}:{root}" if path else root

    def run(self, jobs: dict[str, dict[str, Any]]) -> str:
        """Runs configs by name; returns what was printed."""
        commands = {}
        for name, wanted in jobs.items():
            place = self.folder / name
            place.mkdir(parents=True)
            (place / "run.yaml").write_text(yaml.safe_dump(wanted))
            commands[str(place)] = ["--config-path", str(place), "--config-name", "run.yaml"]
        file = self.folder / f"{next(iter(jobs))}.json"
        file.write_text(json.dumps(commands))
        program = Path(__file__).with_name("upstream_runs.py")
        done = subprocess.run(
            [sys.executable, program, f"{self.root}/main_pretrain.py", file, *self.flags],
            env={**os.environ, "PYTHONPATH": self.path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    def checkpoint(self, name: str, epoch: int = 1) -> Path:
        """The file after an epoch."""
        error = self.folder / name / "error.txt"
        assert not error.exists(), error.read_text()[-2000:]
        (found,) = (self.folder / name / "trained_models").rglob(f"*ep={epoch}.ckpt")
        return found

    def loaded(self, name: str, epoch: int = 1) -> dict[str, Any]:
        """Its content; those of SimSiam hold a function where the plugin is not there."""
        found: dict[str, Any] = torch.load(self.checkpoint(name, epoch), weights_only=False)
        return found

    def log(self, name: str) -> list[dict[str, str]]:
        """Rows of the CSV that Lightning writes."""
        (file,) = (self.folder / name).rglob("metrics.csv")
        return list(csv.DictReader(file.open()))

    def args(self, name: str) -> dict[str, Any]:
        """What the run's args.json says."""
        found: dict[str, Any] = json.loads(self.checkpoint(name).with_name("args.json").read_text())
        return found


@pytest.fixture(scope="module")
def six_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_images(tmp_path_factory.mktemp("six"), range(6), 4)


class Sides(NamedTuple):
    """Every built-in, and SimCLR with validation, with the plugin and without it."""

    ours: Side
    """Also ``theirs``, the other side's BYOL that goes on, and the runs of :func:`asked`."""
    theirs: Side
    printed: str
    """By the first."""


@pytest.fixture(scope="module")
def sides(six_classes: Path, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """One process each: its start takes longer than a run."""
    jobs = {method: config(method, six_classes) for method in BUILTIN}
    jobs["validated"] = validated(six_classes)
    folder = tmp_path_factory.mktemp("sides")
    ours, theirs = Side(folder / "with"), Side(folder / "without", "--without")
    theirs.run(jobs)
    # What asks for something comes last, so that nothing else depends on it.
    more = going_on(theirs, "theirs", six_classes) | asked(ours, six_classes)
    return Sides(ours, theirs, ours.run(jobs | more))


def going_on(side: Side, name: str, images: Path) -> dict[str, Any]:
    """A run of this name that goes on from a side's first epoch of BYOL."""
    start = str(side.checkpoint("byol", 0))
    return {name: config("byol", images, resume_from_checkpoint=start)}


def asked(side: Side, images: Path) -> dict[str, dict[str, Any]]:
    """Runs that ask for something of the plugin's own, in ``asked``."""
    saved = {"enabled": True, "dir": str(side.folder / "saved"), "frequency": 1}
    again: dict[str, Any] = {"checkpoint": saved, "auto_resume": {"enabled": True}}

    def debiased(tau_plus: float) -> dict[str, Any]:
        found = config("debiased", images, max_epochs=1, **again)
        found["method_kwargs"] |= {"tau_plus": tau_plus, "temperature": 0.5}
        return found

    jobs = {
        "validated": validated(images, patches=["own-size"]),
        "unknown": validated(images, patches=["own-sise"]),
        "no-list": validated(images, patches="own-size"),
        "one-crop": config("debiased", images, augmentations=[{**VIEW, "num_crops": 1}]),
        "after": validated(images),
        "debiased": debiased(0.1),
        "same": debiased(0.1),
        "other": debiased(0.0),
    }
    return {f"asked/{name}": job for name, job in jobs.items()}


def validated(images: Path, **changes: Any) -> dict[str, Any]:
    """SimCLR with images to validate on."""
    found = config("simclr", images, **changes)
    found["data"]["val_path"] = str(images)
    return found


def assert_alike(found: Any, expected: Any, place: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=place)
    elif isinstance(expected, dict):
        # The function that makes a checkpoint unreadable is what the plugin leaves out.
        names = expected.keys() - {"get_lr"}
        assert found.keys() == names, place
        for name in names:
            assert_alike(found[name], expected[name], f"{place}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{place}.{number}")
    else:
        assert found == expected, place


def assert_same_run(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_alike(ours[part], theirs[part], part)


@pytest.mark.parametrize("name", [*BUILTIN, "validated"])
def test_a_built_in_is_upstreams(sides: Sides, name: str) -> None:
    """Weights, optimiser, schedule, log and args.json, to the last bit."""
    assert_same_run(sides.ours.loaded(name), sides.theirs.loaded(name))
    log = sides.ours.log(name)
    assert log == sides.theirs.log(name)
    assert len(log) >= 4
    assert sides.ours.args(name) == sides.theirs.args(name)


def test_checkpoints_are_interchangeable(sides: Sides, six_classes: Path, tmp_path: Path) -> None:
    """LARS's groups and the pace of a momentum network are upstream's, whoever goes on."""
    there = Side(tmp_path / "there", "--without")
    ours, theirs = (going_on(getattr(sides, n), n, six_classes) for n in ("ours", "theirs"))
    there.run(ours | theirs)
    expected = there.loaded("theirs")
    assert_same_run(sides.ours.loaded("theirs"), expected)
    assert_same_run(there.loaded("ours"), expected)


def test_a_patch_that_is_asked_for_is_named_and_recorded(sides: Sides) -> None:
    """Also where Hydra's job_logging is disabled; the run after it is upstream's again."""
    side, _, printed = sides
    assert printed.count("patches of solo-learn that change numbers: own-size") == 1
    assert side.args("asked/validated")["patches"] == ["own-size"]
    own, plain = side.log("asked/validated"), side.log("validated")
    losses = [[float(row["val_loss"]) for row in log if row["val_loss"]] for log in (own, plain)]
    assert losses[0] != losses[1]
    assert_same_run(side.loaded("asked/after"), side.loaded("validated"))
    assert side.log("asked/after") == plain
    for name in ("unknown", "one-crop"):
        assert "SystemExit: 2" in (side.folder / "asked" / name / "error.txt").read_text()
    assert "solo_ext: patches='own-size': not a list" in printed
    assert "python -m solo_ext main_pretrain.py" in printed, "what asserts two large crops else"
    assert "solo_ext: patches='own-sise': unknown patch; did you mean 'own-size'?" in printed


@pytest.mark.patch("auto-resume")
def test_an_ablation_is_trained(sides: Sides) -> None:
    """Runs that differ in method_kwargs alone were taken for one."""
    side, _, printed = sides
    assert printed.count("Resuming from previous checkpoint") == 1
    assert len(side.log("asked/debiased")) >= 2
    same = side.folder / "asked" / "same"
    assert not list(same.rglob("metrics.csv")), "it was finished"
    assert len(side.log("asked/other")) >= 2


def test_nothing_of_ours_takes_the_host_down(
    six_classes: Path, tmp_path: Path, sides: Sides
) -> None:
    """A host with a method and a loss of ours, a patch that does not fit, a broken package."""
    assert ROOT is not None
    root = shutil.copytree(ROOT, tmp_path / "host")
    with (root / "solo/methods/__init__.py").open("a") as file:
        file.write("\nMETHODS['pcl'] = METHODS['simclr']\n")
    with (root / "solo/losses/__init__.py").open("a") as file:
        file.write("\nnt_xent_loss_func = simclr_loss_func\n")
    file = root / "solo/utils/knn.py"
    file.write_text(file.read_text().replace("k: int = 20,", "kk: int = 20,"))
    info = tmp_path / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[solo_ext.methods]\ntheirs = not_there:Method\n")
    side = Side(tmp_path / "runs", root=str(root), path=str(tmp_path / "site"))
    pcl = {"queue_size": 12, "num_prototypes": [3, 6], "warmup_epochs": 0}
    ours = config("solo_ext/pcl", six_classes)
    ours["method_kwargs"] |= pcl
    hosts = config("simclr", six_classes) | {"method": "pcl"}
    printed = side.run({"simclr": config("simclr", six_classes), "pcl": hosts, "ours": ours})
    assert_same_run(side.loaded("simclr"), sides.ours.loaded("simclr"))
    assert_same_run(side.loaded("pcl"), sides.ours.loaded("simclr"))
    assert "prototypes.assignments" in side.loaded("ours")["state_dict"]
    assert "solo-learn has a method 'pcl' of its own, which stays" in printed
    assert printed.count("patch 'online-knn' does not fit this solo-learn and is left out") == 1
    assert printed.count("entry point 'theirs' = 'not_there:Method'") == 1


GIT = os.environ.get("SOLO_LEARN_GIT")


@pytest.mark.skipif(GIT is None, reason="SOLO_LEARN_GIT names no clone of solo-learn")
@pytest.mark.parametrize("commit", ["3b357ee", "9b95280", "a151225", "9187ea3"])
def test_runs_on_every_commit_since_december_2023(
    commit: str, six_classes: Path, tmp_path: Path
) -> None:
    root = tmp_path / "host"
    subprocess.run(["git", "clone", "-q", str(GIT), root], check=True)
    subprocess.run(["git", "-C", root, "checkout", "-q", commit], check=True)
    pcl = config("pcl", six_classes)
    pcl["method_kwargs"] |= {"queue_size": 12, "num_prototypes": [3, 6], "warmup_epochs": 0}
    jobs = {"byol": config("byol", six_classes), "pcl": pcl}
    with_, without = (
        Side(tmp_path / name, *flags, root=str(root))
        for name, flags in (("with", ()), ("without", ("--without",)))
    )
    printed = with_.run(jobs)
    without.run({"byol": jobs["byol"]})
    assert_same_run(with_.loaded("byol"), without.loaded("byol"))
    assert "prototypes.assignments" in with_.loaded("pcl")["state_dict"]
    assert "does not fit" not in printed
