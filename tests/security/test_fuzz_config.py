"""Whatever a config holds, it is a valid one or a mistake of one line."""

from __future__ import annotations

import string
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import event, example, given
from hypothesis import strategies as st

from solo_ext.config.check import check_run
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.config.schema import RunConfig
from solo_ext.lab.experiments.settings import read_benchmark
from solo_ext.lab.training.run_dir import CONFIG, read_config
from tests.config.test_compose import MINE
from tests.security.fuzzing import fuzzed, outcome

VALID = MINE.replace("${solo_ext.digits:train}", "train")
KEYS = st.sampled_from(
    [
        *RunConfig.model_fields,
        *("defaults", "hydra", "searchpath", "_target_", "_self_", "kwargs", "lr", "batch_size"),
        *("train_path", "enabled", "rrc", "crop_size", "num_crops", "path", "override", "package"),
    ]
)
ODD_TEXT = st.sampled_from(
    [
        *("", "null", "~", "???", "${", "${}", "${name}", "${.}", "${..name}", "${oc.env:HOME}"),
        *("${oc.env:NO_SUCH_VARIABLE_HERE}", "${solo_ext.digits}", "${oc.create:{a:1}}"),
        *("${oc.decode:'[1,'}", "${${name}}", "${data}", "\\${name}", "a\nb", "\x00", "\ud800"),
        *("inf", ".nan", "1e400", "9" * 400, "0x", "2026-01-01", "1:60", "pkg://os", "../..", "/"),
        *("solo_ext/base/digits@_global_", "/hydra/launcher", "override /hydra/launcher", "<<"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 3)
    | st.floats()
    | ODD_TEXT
    | st.text(max_size=8)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS | ODD_TEXT | st.text(max_size=6) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(KEYS | st.text(max_size=6), TREES, max_size=5)
ODD_LINES = st.sampled_from(
    [
        *("seed: !!bool x", "seed: !!int ''", "seed: !!int _", "seed: !!float ''", "a: !!binary §"),
        *("a: !!timestamp 2001-99-99", "a: 2001-99-99", "a: !!set {b, c}", "a: !!omap [b: 1]"),
        *("a: !!python/object/apply:pathlib.WindowsPath [x]", "a: !!pairs [b: 1]", "? [a]\n: b"),
        *("a: !!python/object/apply:pathlib.PosixPath [x]", "a: !!python/name:os.system ''"),
        *("a: !!python/object/apply:os.system [true]", "a: !!python/module:os ''", "a: &x [*x]"),
        *("a: &x {b: *x}", "a: *nothing", "<<: [1]", "<<: {seed: 1}", "=: =", "--- ", "...", "- a"),
        *("%YAML 9", "a: |", "'", '"', "[", "}", "\t", "? ", ": ", "{a: 1}: 2", "1: 2", "true: 1"),
        *(
            "null: 1",
            "1.5: 2",
            "a.b: 1",
            "hydra: {}",
            "hydra: ${a}",
            "hydra.searchpath: [pkg://os]",
        ),
        *("# @package x", "defaults: []", "defaults: null", "defaults: [x: y: z]", "package: 3"),
        *("a: ${a}", "a: ${b\n"),
        *("\ufeff", "a: \ud7ff", "seed: 08", "seed: 0b2", "seed: 1_0", "max_epochs: 1e99999"),
    ]
)
WORDS = st.text(
    st.sampled_from(string.ascii_letters + string.digits + "_.[]{}()=,:$~+@/'\"\\ -\t"), max_size=12
)
PATHS = st.lists(KEYS | st.sampled_from(["0", "1", "-1", "x"]) | WORDS, min_size=1, max_size=3).map(
    ".".join
)
VALUES = (
    SCALARS.map(str)
    | WORDS
    | TREES.map(lambda tree: yaml.safe_dump(tree, default_flow_style=True, width=10**9))
)
OVERRIDES = st.lists(
    st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["", "+", "++", "~", "-"]),
        PATHS,
        st.sampled_from(["=", "", "==", "@x="]),
        VALUES,
    )
    | st.text(max_size=15),
    max_size=3,
)


def read_from(content: bytes | str, name: str, read: Callable[[Path], Any]) -> str:
    """How it ends to read a folder with one file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        if isinstance(content, str):
            content = content.encode(errors="surrogatepass")
        file.write_bytes(content)
        return outcome(read, Path(folder))


def composed(content: bytes | str) -> str:
    return read_from(content, "run.yaml", lambda folder: check_run(compose("run", (), folder)))


def of_a_run(content: str) -> str:
    return read_from(content, CONFIG, lambda folder: check_run(read_config(folder)))


def of_a_benchmark(content: str, overrides: Sequence[str] = ()) -> str:
    return read_from(
        content,
        "benchmark.yaml",
        lambda folder: read_benchmark(str(folder / "benchmark.yaml"), overrides).model_dump(),
    )


def dumped(tree: Any) -> str:
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)


def test_the_valid_one_is_valid() -> None:
    assert composed(VALID) == "loads"


@fuzzed(20, 1000)
@given(MAPPINGS)
def test_valid_config_with_something_else_in_it(tree: dict[Any, Any]) -> None:
    whole = {**yaml.safe_load(VALID), **tree}
    event(composed(dumped(whole)))


@fuzzed(40, 1000)
@given(st.data())
def test_valid_config_with_lines_gone_astray(data: st.DataObject) -> None:
    lines = VALID.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines)))
        match data.draw(st.sampled_from(["insert", "remove", "repeat", "indent", "cut"])):
            case "insert":
                lines.insert(place, data.draw(ODD_LINES))
            case "remove":
                del lines[place : place + 1]
            case "repeat":
                lines[place:place] = lines[place : place + 1]
            case "indent":
                lines[place : place + 1] = ["  " + line for line in lines[place : place + 1]]
            case "cut":
                lines[place : place + 1] = [
                    line[: len(line) // 2] for line in lines[place : place + 1]
                ]
    event(composed("\n".join(lines)))


@fuzzed(20, 1000)
@given(st.binary(max_size=60) | st.text(max_size=60))
def test_bytes_that_may_be_no_text(content: bytes | str) -> None:
    event(composed(content))


@fuzzed(60, 1000)
@given(OVERRIDES)
@example(["++a=${a}"])
def test_overrides(overrides: list[str]) -> None:
    event(outcome(lambda: check_run(compose("cifar10/simclr", overrides))))


@fuzzed(20, 1000)
@given(st.text(max_size=20) | st.sampled_from(shipped_configs()) | ODD_TEXT)
@example("9" * 5000)
@example("a\x00b")
def test_names_of_configs(name: str) -> None:
    event(outcome(lambda: check_run(compose(name))))


@fuzzed(30, 1000)
@given(MAPPINGS | TREES)
def test_config_of_a_run_directory(tree: Any) -> None:
    event(of_a_run(dumped(tree)))


@fuzzed(30, 1000)
@given(st.lists(ODD_LINES, min_size=1, max_size=3).map("\n".join))
def test_odd_yaml_wherever_it_is_read(text: str) -> None:
    for read in (of_a_run, of_a_benchmark, composed):
        event(read(text))


@fuzzed(30, 1000)
@given(MAPPINGS, OVERRIDES)
def test_benchmarks(tree: dict[Any, Any], overrides: list[str]) -> None:
    event(of_a_benchmark(dumped(tree), overrides))
