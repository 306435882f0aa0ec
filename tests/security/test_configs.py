"""A config from someone else runs no code, unless the user allows it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.config.check import check_run
from solo_ext.config.compose import compose
from solo_ext.config.untrusted import ALLOW_CODE_VARIABLE
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.cli.main import main
from solo_ext.lab.experiments.settings import read_benchmark
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.run_dir import CONFIG, read_config
from tests.lab.training.same_run import train
from tests.security.test_fuzz_config import VALID

REMEDY = f"set {ALLOW_CODE_VARIABLE}=1 if you trust whoever wrote the config"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of configs from someone else, ``run.yaml`` among them."""
    (tmp_path / "run.yaml").write_text(VALID)
    return tmp_path


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(compose("run", overrides, folder))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


HYDRA = {
    "searchpath": "hydra: {searchpath: [pkg://PACKAGE]}",
    "searchpath, deep": "hydra: {searchpath: [file:///tmp, pkg://PACKAGE.inner]}",
    "merged": "base: &base {searchpath: [pkg://PACKAGE]}\nhydra: {<<: *base}",
    "merged above": "<<: {hydra: {searchpath: [pkg://PACKAGE]}}",
    "interpolation": "path: {searchpath: [pkg://PACKAGE]}\nhydra: ${path}",
    "interpolation within": "path: [pkg://PACKAGE]\nhydra: {searchpath: '${path}'}",
    "callbacks": "hydra: {callbacks: {mine: {_target_: PACKAGE.call}}}",
    "launcher": "hydra: {launcher: {_target_: PACKAGE.call}}",
    "sweeper": "hydra: {sweeper: {_target_: PACKAGE.call}}",
    "logging": "hydra: {job_logging: {version: 1, filters: {a: {(): PACKAGE.call}}}}",
    "behind a tag": "a: !!python/object/apply:pathlib.PosixPath [x]\nhydra: {searchpath: [pkg://PACKAGE]}",
}


@pytest.mark.parametrize("section", HYDRA.values(), ids=HYDRA)
def test_settings_of_hydra(section: str, mine: Path, package: str) -> None:
    (mine / "run.yaml").write_text(VALID + section.replace("PACKAGE", package) + "\n")
    line = refusal(mine)
    assert line.startswith("hydra")
    assert REMEDY in line


def test_settings_of_hydra_that_name_no_code(mine: Path) -> None:
    """solo-learn's own configs have them."""
    plain = compose("run", (), mine)
    section = "{output_subdir: null, run: {dir: .}, sweep: {dir: x}, job: {chdir: false}}"
    (mine / "run.yaml").write_text(f"{VALID}hydra: {section}\n")
    assert compose("run", (), mine) == plain


@pytest.mark.parametrize("value", ["", "true"])
def test_only_one_word_allows_it(
    value: str, mine: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_CODE_VARIABLE, value)
    (mine / "run.yaml").write_text(VALID + f"hydra: {{searchpath: [pkg://{package}]}}\n")
    assert "hydra.searchpath" in refusal(mine)


def test_the_user_allows_it(mine: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused else: the package is imported, and its configs found."""
    monkeypatch.setenv(ALLOW_CODE_VARIABLE, "1")
    text = VALID.replace("  - _self_", "  - inner@_global_\n  - _self_")
    (mine / "run.yaml").write_text(text + f"hydra: {{searchpath: [pkg://{package}]}}\n")
    assert compose("run", (), mine)["seed"] == 1
    assert sys.modules.pop(package, None) is not None


@pytest.mark.parametrize(
    "entry",
    [
        "pkg://PACKAGE/inner",
        "pkg://PACKAGE/inner@_global_",
        "/pkg://PACKAGE/inner",
        "override /hydra/launcher: PACKAGE",
        "/hydra/callbacks: mine",
        "other",
        "/hydra/job_logging: pkg://PACKAGE/inner",
    ],
)
def test_defaults_import_nothing(entry: str, mine: Path, package: str) -> None:
    """Entries of a defaults list are files; settings of Hydra in such a file are not used."""
    (mine / "other.yaml").write_text(
        f"# @package _global_\nhydra: {{searchpath: [pkg://{package}]}}\n"
    )
    callbacks = mine / "hydra" / "callbacks"
    callbacks.mkdir(parents=True)
    (callbacks / "mine.yaml").write_text(f"mine: {{_target_: {package}.call}}\n")
    line = f"  - {entry.replace('PACKAGE', package)}\n  - _self_"
    (mine / "run.yaml").write_text(VALID.replace("  - _self_", line))
    # Whether there are such files or not.
    with contextlib.suppress(UserError):
        check_run(compose("run", (), mine))


@pytest.mark.parametrize(
    "word",
    [
        "hydra.searchpath=[pkg://PACKAGE]",
        "+hydra.searchpath=[pkg://PACKAGE]",
        "++hydra.callbacks.mine._target_=PACKAGE.call",
        "hydra/launcher=PACKAGE",
        "hydra.searchpath@x=[pkg://PACKAGE]",
        "pkg://PACKAGE/inner@x=y",
    ],
)
def test_overrides_import_nothing(word: str, mine: Path, package: str) -> None:
    with pytest.raises(UserError):
        check_run(compose("run", [word.replace("PACKAGE", package)], mine))


TARGETS = {
    "top level": ("_target_: PACKAGE.call", "_target_"),
    "backbone": (
        "backbone: {name: timm/resnet10t, kwargs: {act_layer: {_target_: PACKAGE.call}}}",
        "backbone.kwargs.act_layer._target_",
    ),
    "method": ("method_kwargs: {a: [1, {_target_: PACKAGE.call}]}", "method_kwargs.a.1._target_"),
    "unknown section": ("x: {y: {z: {_target_: PACKAGE.call}}}", "x.y.z._target_"),
}


@pytest.mark.parametrize(("text", "key"), TARGETS.values(), ids=TARGETS)
def test_targets(text: str, key: str, mine: Path, package: str) -> None:
    config = {**yaml.safe_load(VALID), **yaml.safe_load(text.replace("PACKAGE", package))}
    (mine / "run.yaml").write_text(yaml.safe_dump(config))
    line = refusal(mine)
    assert line.startswith(f"{key}=")
    assert "a config names Python to run" in line
    assert REMEDY in line


def test_targets_in_a_run_directory(mine: Path, package: str) -> None:
    config = {**compose("run", (), mine), "method_kwargs": {"_target_": f"{package}.call"}}
    (mine / CONFIG).write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"method_kwargs\._target_"):
        check_run(read_config(mine))
    assert main(["pretrain", "--resume", str(mine)]) == 2


def test_allowed_targets_are_values_like_others(
    mine: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here calls them: this is for code that gets a config from here."""
    monkeypatch.setenv(ALLOW_CODE_VARIABLE, "1")
    config = {**compose("run", (), mine), "method_kwargs": {"_target_": f"{package}.call"}}
    assert check_run(config).method_kwargs == {"_target_": f"{package}.call"}


def readers(folder: Path, text: str) -> list[Callable[[], Any]]:
    """All that read YAML from elsewhere, each with a file of that text."""
    for name in ("run.yaml", CONFIG, "bench.yaml"):
        (folder / name).write_text(text)
    return [
        lambda: compose("run", (), folder),
        lambda: read_config(folder),
        lambda: read_benchmark(str(folder / "bench.yaml")),
    ]


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch MARK']",
        "!!python/name:os.system ''",
        "!!python/object:solo_ext.core.errors.UserError {}",
    ],
)
def test_yaml_tags(tag: str, mine: Path, mark: Path) -> None:
    text = VALID + f"wandb: {tag.replace('MARK', str(mark))}\n"
    for read in readers(mine, text):
        with pytest.raises(UserError, match="could not determine a constructor"):
            read()


BOMBS = {
    "millions of values": "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(12)
    ),
    "a circle": "a: &a {b: *a}\n",
    "a circle of lists": "a: &a [*a]\n",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.timeout(60)
def test_aliases_that_blow_up(bomb: str, mine: Path) -> None:
    says = re.escape("aliases (*name) lead in a circle or stand for more than")
    for read in readers(mine, VALID + bomb):
        with pytest.raises(UserError, match=says):
            read()


def test_aliases_as_people_write_them(mine: Path) -> None:
    (mine / "run.yaml").write_text(VALID + "checkpoint: &off {enabled: false}\nauto_resume: *off\n")
    assert compose("run", (), mine)["auto_resume"] == {"enabled": False}


@pytest.mark.parametrize(
    "override",
    [
        "method=PACKAGE.call",
        "backbone.name=PACKAGE.call",
        "backbone.name=timm/PACKAGE.call",
        "backbone.name='timm/hf_hub:PACKAGE/call'",
        "method_kwargs.loss=PACKAGE.call",
        "method_kwargs.loss=pml/PACKAGE.call",
        "method_kwargs.loss=pml/os.system",
        "method_kwargs.loss=pml/__builtins__",
        "profiler=PACKAGE.call",
        "scheduler.name=PACKAGE.call",
        "optimizer.name=PACKAGE.call",
    ],
)
def test_names_are_those_of_a_registry(override: str, package: str, images: Path) -> None:
    """Not paths of Python objects."""
    sizes = ["data.dataset=custom", f"data.train_path={images}", "data.val_path=null"]
    word = override.replace("PACKAGE", package)
    key, _, name = word.partition("=")
    metric = "loss" in key
    if metric:
        sizes.append("method_kwargs.clusters.num_prototypes=[4]")
    config = "cifar10/metric" if metric else "cifar10/simclr"
    with pytest.raises(
        UserError, match=rf"^{re.escape(key)}=.*{package if package in name else ''}"
    ):
        prepare(compose(config, [*sizes, "optimizer.batch_size=8", word]))


def test_strategies_are_those_of_lightning(
    package: str, make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = make_config("simclr", strategy=f"{package}.call")
    with pytest.raises(UserError, match=r"the Trainer refuses the config|strategy="):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    "words",
    [
        ("pretrain", "--config-name", "LONG"),
        ("pretrain", "--config-name", "run", "--config-path", "LONG"),
        ("pretrain", "--resume", "LONG"),
        ("pretrain", "--config-name", "cifar10/simclr", "resume_from_checkpoint=LONG"),
        ("pretrain", "--config-name", "cifar10/simclr", "data.train_path=LONG"),
        ("pretrain", "--config-name", "cifar10/seed", "method_kwargs.teacher.path=LONG"),
        ("eval", "knn", "LONG"),
        ("export", "LONG", "--format", "timm"),
        ("benchmark", "run", "LONG.yaml"),
        ("benchmark", "report", "LONG"),
    ],
    ids=" ".join,
)
def test_names_that_are_too_long(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("LONG", "a" * 5000) for word in words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


SECRET = "an-access-key-that-nobody-may-see"


def test_files_of_a_run_read_no_environment(
    make_config: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Somebody else's run, whose evaluation or export is published."""
    monkeypatch.setenv("SOLO_EXT_TEST_SECRET", SECRET)
    config = make_config("simclr", max_epochs=2)
    config["data"]["val_path"] = config["data"]["train_path"]
    run = tmp_path / "run"
    train(config, run)
    stolen = "${oc.env:SOLO_EXT_TEST_SECRET}"
    args = json.loads((run / "args.json").read_text())
    args |= {"name": stolen, "method": stolen}
    args["backbone"]["kwargs"] |= {"note": "${name}", stolen: 1}
    (run / "args.json").write_text(json.dumps(args))
    knn = ["device=cpu", "k=[1]"]
    # Its backbone is refused with what it was given, which is shown.
    assert main(["eval", "knn", str(run), *knn]) == 2
    args["backbone"]["kwargs"] = config["backbone"]["kwargs"]
    (run / "args.json").write_text(json.dumps(args))
    assert main(["eval", "knn", str(run), *knn]) == 0
    assert main(["eval", "suite", str(run), "device=cpu", "protocols=[knn]"]) == 0
    assert main(["export", str(run), "--format", "safetensors"]) == 0
    held = yaml.safe_load((run / CONFIG).read_text())
    (run / CONFIG).write_text(yaml.safe_dump(held | {"wandb": {"project": stolen}}))
    assert main(["pretrain", "--resume", str(run)]) == 2
    out, err = capsys.readouterr()
    assert "wandb.project='${oc.env:SOLO_EXT_TEST_SECRET}': an interpolation" in err
    assert stolen in json.loads((run / "eval_knn.json").read_text())["method"]
    written = b"".join(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    assert SECRET.encode() not in written
    assert SECRET not in out + err
