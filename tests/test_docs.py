"""Commands and snippets of the pages are those of this version; nothing is trained."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs, check_run
from solo_ext.config.compose import apply_overrides, compose, parse
from solo_ext.lab.cli.doctor import diagnose
from solo_ext.lab.cli.main import build_parser
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, read_settings
from solo_ext.lab.evaluation.names import SUITE
from solo_ext.lab.evaluation.suite import read_suite_settings
from solo_ext.lab.experiments.settings import checked_benchmark, read_benchmark
from solo_ext.methods import METHODS, load_all

ROOT = Path(__file__).parents[1]
TEXTS = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(TEXTS)}


def blocks(page: str, language: str) -> list[str]:
    """Contents of the page's fences of a language, indented ones too."""
    fence = rf"^( *)```{language}(?: [^\n]*)?\n(.*?)^ *```$"
    found = re.findall(fence, PAGES[page], flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands(page: str) -> list[list[str]]:
    """Command lines of a page as words, from the command on."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    every = [shlex.split(line, comments=True) for line in lines]
    # `sets up && solo-ext ...` and `torchrun ... solo-ext ...` too.
    return [words[words.index("solo-ext") + 1 :] for words in every if "solo-ext" in words] + [
        words[words.index("solo_ext") + 1 :] for words in every if "solo_ext" in words
    ]


def own_configs(page: str, folder: Path) -> None:
    """Writes the page's configs, which name their file in the first line."""
    for text in blocks(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", text):
            file = folder / named[1]
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)


def check_pretraining(config: dict[str, Any]) -> None:
    """Keys and values of a composed config, its method's too, where that is one of ours."""
    check_run(config)
    assert load_all() == {}
    if config["method"] in METHODS:
        kind: Any = METHODS[config["method"]].target
        check_method_kwargs(kind.kwargs_type, config["method_kwargs"])


def check_command(words: list[str], folder: Path) -> None:
    """What a command refuses before it looks at a run or at data."""
    args = build_parser().parse_args(words)
    settings = OmegaConf.create({})
    if args.command == "eval":
        apply_overrides(settings, parse(args.overrides))
        plain: Any = OmegaConf.to_container(settings)
        if args.protocol == SUITE:
            read_suite_settings(plain)
        else:
            read_settings(PROTOCOLS[args.protocol], plain)
    elif args.command == "benchmark" and args.action != "report":
        found = read_benchmark(args.config, args.overrides)
        assert set(args.rows or ()) <= set(found.rows)
        assert args.action == "run" or found.tuning
    elif args.command == "pretrain" and args.config_name:
        own = folder / args.config_path if args.config_path else None
        # A path in capitals stands for a reader's.
        if own is None or not re.match("[A-Z]", args.config_path):
            check_pretraining(compose(args.config_name, args.overrides, own))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_are_accepted(page: str, tmp_path: Path) -> None:
    own_configs(page, tmp_path)
    for words in commands(page):
        if not words[0].endswith(".py"):
            check_command(words, tmp_path)
        elif "--config-path" not in words and "--config-name" in words:
            # solo-learn's own scripts find our configs by the same names.
            name = words[words.index("--config-name") + 1]
            assert (ROOT / "configs" / f"{name}.yaml").is_file(), name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_configs_compose(page: str, tmp_path: Path) -> None:
    own_configs(page, tmp_path)
    for file in tmp_path.rglob("*.yaml"):
        check_pretraining(compose(file.stem, (), file.parent))
    for given in map(yaml.safe_load, blocks(page, "yaml")):
        if "rows" in given:
            checked_benchmark(given)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_snippets_run(page: str) -> None:
    """One after the other in one namespace; those of a run's or a reader's files are compiled."""
    names: dict[str, Any] = {"__name__": page}
    for text in blocks(page, "python"):
        code = compile(text, page, "exec")
        if not re.search(r'RUN_DIR|\bdict\(|"photos"', text):
            exec(code, names)


def test_what_methods_log_is_explained() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "solo_ext" / "methods").glob("*.py"))
    logged = set(re.findall(r'"(train_[a-z_]*[a-z])(?=["_])', sources))
    assert {"train_hardness", "train_proto_acc"} <= logged
    page = PAGES["docs/reference/logged.md"]
    own = {f"train_{method}_loss" for method in METHODS}  # `train_<method>_loss` on the page
    assert not [name for name in sorted(logged - own) if name not in page]


def test_every_extra_is_explained_in_the_same_words() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    section = project.partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    comments = re.findall(r"^# (.+)\n([a-z0-9-]+) = ", section, re.M)
    page = PAGES["docs/start/install.md"]
    table = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", page, re.M)
    assert table == [(name, purpose) for purpose, name in comments]
    assert [name for name, _ in table] == list(extras)
    # `doctor` has one line for the builds of DALI, and one for W&B, which is no extra.
    builds = {"faiss-gpu", "dali-cuda12", "dali-cuda13"}
    assert {*extras} - builds == {*diagnose()["extras"]} - {"dali", "wandb"}


def test_citation_and_changelog_are_of_one_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    newest = re.search(r"^## (.+?),", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == cited
