"""solo-learn's own, unmodified scripts with the plugin installed beside them.

As ``python SCRIPT.py``, which Hydra's plugin serves, and as ``python -m solo_ext SCRIPT.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from solo_ext.data.digits import digits_folder
from tests import forks
from tests.digits import few_digits

ROOT = os.environ.get("SOLO_LEARN_ROOT", "")
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not ROOT, reason="SOLO_LEARN_ROOT names no checkout of main"),
]
LAUNCHER = ("-m", "solo_ext")
Python = Callable[..., subprocess.CompletedProcess[str]]
STEPS, BATCH = 2, 40
PER_CLASS = 28
TINY = (
    "accelerator=cpu",
    "backbone.name=timm/resnet10t",
    "backbone.kwargs={channels: [8,8,8,8]}",
    "+backbone.kwargs.stem_width=8",
    f"+limit_train_batches={STEPS}",
    "+limit_val_batches=1",
    # Validation resizes digits to 224 pixels.
    "+num_sanity_val_steps=0",
    f"optimizer.batch_size={BATCH}",
    "data.num_workers=0",
    "+enable_progress_bar=false",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # A fifth of the digits to train on.
    data = few_digits(tmp_path_factory.mktemp("data"), train=PER_CLASS, val=6)
    return {**os.environ, "PYTHONPATH": ROOT, "SOLO_EXT_DATA": str(data), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def python(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Python:
    """``python(*words)``, in a folder of its own, of a process that has imported the libraries."""
    return partial(forks.run, env=environment, cwd=tmp_path_factory.mktemp("python"))


@pytest.fixture
def cold(environment: dict[str, str], tmp_path: Path) -> Python:
    """``cold(*words)``: as users start it."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    return run


def script(name: str) -> str:
    return str(Path(ROOT, name))


def digits(method: str, scratch: Path, *overrides: str) -> tuple[str, ...]:
    """``main_pretrain.py`` for an epoch of two steps."""
    return (
        script("main_pretrain.py"),
        *("--config-name", f"solo_ext/digits/{method}"),
        *(f"checkpoint.dir={scratch}", "max_epochs=1", *TINY, *overrides),
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def pretrained(
    python: Python, method: str, scratch: Path, *overrides: str, start: str = ""
) -> Path:
    """The checkpoint folder of a run, by the launcher where ``start`` says so."""
    words = digits(method, scratch, *overrides)
    succeeded(python(*(LAUNCHER if start == "launcher" else ()), *words))
    return max((scratch / method).iterdir(), key=lambda path: path.stat().st_mtime)


def resumed(
    python: Python, method: str, scratch: Path, *overrides: str, start: str = ""
) -> dict[str, torch.Tensor]:
    """The state of the second of two epochs, each a run of its own."""
    first = pretrained(python, method, scratch, *overrides, start=start)
    (checkpoint,) = first.glob("*.ckpt")
    more = ("max_epochs=2", f"+resume_from_checkpoint='{checkpoint}'")
    again = pretrained(python, method, scratch, *overrides, *more, start=start)
    (checkpoint,) = again.glob("*ep=1.ckpt")
    state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return state


@pytest.fixture(scope="module")
def folder(python: Python, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of `python main_pretrain.py --config-name solo_ext/digits/debiased`."""
    scratch = tmp_path_factory.mktemp("upstream")
    succeeded(python(*digits("debiased", scratch)))
    (made,) = (scratch / "debiased").iterdir()
    return made


@pytest.mark.parametrize("e_step", ["exact", "bank"])
def test_main_pretrain_runs_the_e_step_and_resumes(
    python: Python, tmp_path: Path, e_step: str
) -> None:
    settings = ("method_kwargs.warmup_epochs=0", f"method_kwargs.e_step={e_step}")
    state = resumed(python, "pcl", tmp_path, *settings)
    assert state["prototypes.assignments"].shape == (3, 10 * PER_CLASS)
    assert state["prototypes.assignments"].amax(1).tolist() > [15, 40, 80]
    assert state["prototypes._extra_state"][0] == 1, "the epoch of the E-step"


@pytest.mark.parametrize("validation", ["", "data.val_path=null"])
def test_main_pretrain_reads_through_dali(python: Python, tmp_path: Path, validation: str) -> None:
    """PCL, its E-step and epochs cut short; sample indices need not be asked for."""
    pytest.importorskip("nvidia.dali")
    run = pretrained(
        python,
        "pcl",
        tmp_path,
        "max_epochs=2",
        "data.format=dali",
        "+dali.device=cpu",
        "method_kwargs.warmup_epochs=1",
        *filter(None, [validation]),
    )
    (checkpoint,) = run.glob("*ep=1.ckpt")
    found = torch.load(checkpoint, weights_only=True)
    assert found["global_step"] == 2 * STEPS
    assert found["state_dict"]["prototypes.assignments"].shape == (3, 10 * PER_CLASS)
    assert json.loads((run / "args.json").read_text())["dali"] == {
        "device": "cpu",
        "encode_indexes_into_labels": True,
    }


COMBINATIONS = {
    "mochi": ("method_kwargs.mixing.warmup_epochs=0",),
    "nnclr_symmetric": (f"method_kwargs.support_set.size={2 * BATCH}",),
    "metric": (
        "method_kwargs.loss=arcface_loss_func",
        "~method_kwargs.loss_kwargs",
        "method_kwargs.classes=cluster",
        "+method_kwargs.clusters={num_prototypes: [20], warmup_epochs: 0}",
    ),
}


@pytest.mark.parametrize("method", COMBINATIONS)
def test_main_pretrain_runs_and_resumes(python: Python, tmp_path: Path, method: str) -> None:
    state = resumed(python, method, tmp_path, *COMBINATIONS[method])
    if method == "mochi":
        assert state["queues.0._extra_state"][1] == 2 * STEPS * BATCH
    if method == "nnclr_symmetric":
        assert (state["support_set.indices"] >= 0).all()
    if method == "metric":
        assert state["prototypes._extra_state"][0] == 1, "the epoch of the E-step"
    assert ("momentum_backbone" in str(list(state))) == (method == "mochi")


DISTILLED = {"seed": (), "protoseed": ("method_kwargs.num_prototypes=50",), "protocpc": ()}


@pytest.mark.parametrize(
    ("method", "start"),
    [*((method, "") for method in DISTILLED), ("seed", "launcher")],
)
def test_main_pretrain_distils_and_resumes(
    python: Python, tmp_path: Path, folder: Path, method: str, start: str
) -> None:
    """From a run of the script itself; one large crop, which needs the launcher, or two."""
    settings = DISTILLED[method]
    if method != "protocpc":
        crops = () if start else ("augmentations.0.num_crops=2",)
        settings = (*settings, *crops, f"method_kwargs.teacher.path='{folder}'")
    state = resumed(python, method, tmp_path, *settings, start=start)
    assert not any(key.startswith("teacher.backbone") for key in state)
    if method == "seed":
        assert state["queues.0._extra_state"][1] == 2 * STEPS * BATCH
    else:
        assert state["prior.value"].std() > 0
        torch.testing.assert_close(
            state["prior.value"].sum(), torch.tensor(50.0 if method == "protoseed" else 256.0)
        )


def test_main_pretrain_takes_the_keys_of_our_augmentation(cold: Python, tmp_path: Path) -> None:
    """It reads none of them, and nothing trips over them: neither the methods nor the folder."""
    settings = (
        # The config itself has `data.augmentation` and `data.in_memory`.
        "precision=auto",
        "+data.mix={name: mixup}",
        "+augmentations.0.rand_augment={num_ops: 1}",
    )
    run = pretrained(cold, "debiased", tmp_path, *settings)
    assert list(run.glob("*.ckpt"))
    assert json.loads((run / "args.json").read_text())["data"]["augmentation"] == "batch"


@pytest.mark.parametrize("start", [(), LAUNCHER])
def test_main_linear_evaluates_with_no_missing_key(
    python: Python, folder: Path, tmp_path: Path, start: tuple[str, ...]
) -> None:
    (checkpoint,) = folder.glob("*.ckpt")
    words = ("--config-name", "solo_ext/linear/digits", "max_epochs=1", *TINY)
    paths = f"checkpoint.dir={tmp_path}", f"pretrained_feature_extractor='{checkpoint}'"
    succeeded(python(*start, script("main_linear.py"), *words, *paths))
    (linear,) = tmp_path.rglob("*.ckpt")
    given = torch.load(checkpoint, weights_only=True)["state_dict"]
    used = torch.load(linear, weights_only=True)["state_dict"]
    backbone = {k: v for k, v in used.items() if k.startswith("backbone.")}
    assert backbone
    for key, value in backbone.items():
        assert torch.equal(value, given[key]), f"{key} was not loaded"


def of_arguments(name: str, folder: Path, images: Path) -> tuple[str, ...]:
    """One of the scripts that take arguments, as upstream's own shell scripts call it."""
    return (
        *LAUNCHER,
        script(name),
        *("--dataset", "custom", "--batch_size", "16", "--num_workers", "0"),
        *("--train_data_path", str(images), "--val_data_path", str(images)),
        *("--pretrained_checkpoint_dir", str(folder)),
    )


def test_main_knn(cold: Python, folder: Path, images: Path) -> None:
    """Every image is its own nearest neighbour, whatever is compared, and by what."""
    words = of_arguments("main_knn.py", folder, images)
    settings = ("--k", "1", "20", "--temperature", "0.1", "0.5")
    kinds = ("--feature_type", "backbone", "projector", "--distance_function")
    done = cold(*words, *settings, *kinds, "euclidean", "cosine")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"k=(\d+), T=.*\nResult: acc@1=([\d.]+), acc@5=([\d.]+)", done.stdout)
    assert len(found) == 2 * 2 * 3
    assert {float(acc1) for k, acc1, _ in found if k == "1"} == {100.0}
    assert {float(acc5) for _, _, acc5 in found} == {100.0}, "of three classes"
    assert done.stderr.count("no CUDA device here") == (not torch.cuda.is_available())


def test_main_umap(python: Python, folder: Path, images: Path, tmp_path: Path) -> None:
    done = python(*of_arguments("main_umap.py", folder, images), cwd=tmp_path)
    packages = ("pandas", "seaborn", "umap", "matplotlib", "wandb")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        line = done.stderr.splitlines()[-1]
        assert done.returncode == 2
        assert line.startswith(f"main_umap.py: the package '{missing[0]}' is not installed")
        assert "pip install umap-learn" in line
        assert "Traceback" not in done.stderr
    else:
        succeeded(done)
        for split in ("train", "val"):
            assert (tmp_path / f"im100_{split}_umap.pdf").read_bytes().startswith(b"%PDF")


def test_two_processes_begin_in_the_launcher(python: Python, folder: Path, tmp_path: Path) -> None:
    """The second dies of the assertion of two large crops if it does not."""
    words = digits("seed", tmp_path, f"method_kwargs.teacher.path='{folder}'")
    ddp = ("devices='2'", "strategy=ddp")
    succeeded(python(*LAUNCHER, *words, *ddp, cwd=tmp_path))
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert state["queues.0._extra_state"][1] == 2 * STEPS * BATCH


MISTAKES = {
    "method": ("method=debiasd", "method='debiasd': unknown method; did you mean 'debiased'?"),
    "crops": ("augmentations.0.num_crops=3", "'3 large crops': simclr of solo-learn takes two"),
    "kwargs": ("method=seed", "method_kwargs.proj_output_dim=128: unknown key"),
    "package": ("+wandb={enabled: true}", "pip install -U 'wandb"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(python: Python, tmp_path: Path, mistake: str) -> None:
    if mistake == "package" and find_spec("wandb"):
        pytest.skip("wandb is installed")
    override, says = MISTAKES[mistake]
    done = python(*LAUNCHER, *digits("simclr", tmp_path, override))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("main_pretrain.py: ")
    assert says in line


def test_a_script_that_is_not_there(python: Python) -> None:
    done = python(*LAUNCHER, "main_kmn.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("main_kmn.py: No such file or directory; name a script")


def test_hydra_works_in_the_launcher(python: Python, tmp_path: Path) -> None:
    """Several runs of one command, and a folder of configs relative to the script."""
    main_pretrain, *words = digits("debiased", tmp_path, "+seed=1,2")
    succeeded(python(*LAUNCHER, main_pretrain, "--multirun", *words))
    seeds = [json.loads(file.read_text())["seed"] for file in tmp_path.rglob("args.json")]
    assert sorted(seeds) == [1, 2]
    words = ["--config-path", "scripts/pretrain/cifar", "--config-name", "simclr.yaml"]
    shown = succeeded(python(*LAUNCHER, main_pretrain, *words, "--cfg", "job"))
    assert "name: simclr-cifar10" in shown


PROBE = """
import pickle
import sys

def main():
    pass

assert pickle.loads(pickle.dumps(main)) is main
print([__name__, __file__, __spec__, sys.argv, sys.path[0], main.__code__.co_filename])
if "torch.cuda" in sys.argv:
    import torch

    model = torch.nn.Linear(2, 2).to("cuda:0", torch.float64)
    moved = model.cuda()(torch.zeros(1, 2).to(device=torch.device("cuda")).double().cuda())
    print(moved.device.type, moved.dtype)
"""


def test_a_script_finds_what_python_gives_it(python: Python, cold: Python, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "probe.py").write_text(PROBE)
    plain = cold("sub/probe.py", "--a", "b")
    succeeded(plain)
    done = python(*LAUNCHER, "sub/probe.py", "--a", "b", cwd=tmp_path)
    assert succeeded(done).splitlines()[-1:] == plain.stdout.splitlines()
    if not torch.cuda.is_available():
        shown = succeeded(python(*LAUNCHER, "sub/probe.py", "torch.cuda", cwd=tmp_path))
        assert shown.splitlines()[-1] == "cpu torch.float64"
        assert shown.count("no CUDA device here") == 1


def test_our_evaluation_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    from solo_ext.lab.evaluation.evaluate import evaluate

    # Its args.json holds interpolations, which are not resolved out of a file.
    paths = {f"{split}_path": str(digits_folder(split, tmp_path)) for split in ("train", "val")}
    record = evaluate(folder, "knn", {"k": [20], "data": paths})
    assert record["epoch"] == 1
    assert record["image_size"] == 32
    assert record["results"][0]["acc1"] > 20
