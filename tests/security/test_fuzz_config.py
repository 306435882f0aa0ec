"""Whatever a config holds, it is a valid one or a mistake of one line."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import event, example, given
from hypothesis import strategies as st

from solo_ext.config.check import check_run
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import UserError
from solo_ext.lab.experiments.settings import read_benchmark
from solo_ext.lab.training.run_dir import CONFIG, read_config
from tests.config.test_compose import MINE
from tests.security.fuzzing import fuzzed

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


def outcome(run: Any, *args: Any) -> str:
    """``valid`` or ``refused``; anything else is raised."""
    try:
        run(*args)
    except UserError as error:
        said = str(error)
    else:
        return "valid"
    assert len(said.splitlines()) == 1
    assert said.strip()
    return "refused"


def loaded(text: str, overrides: list[str] = []) -> RunConfig:  # noqa: B006
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_bytes(text.encode(errors="surrogatepass"))
        return check_run(compose("run", overrides, Path(folder)))


def dumped(tree: Any) -> str:
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)


def test_the_valid_one_is_valid() -> None:
    assert outcome(loaded, VALID) == "valid"


@fuzzed(20, 1000)
@given(MAPPINGS)
def test_valid_config_with_something_else_in_it(tree: dict[Any, Any]) -> None:
    whole = {**yaml.safe_load(VALID), **tree}
    event(outcome(loaded, dumped(whole)))


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
    event(outcome(loaded, "\n".join(lines)))


@fuzzed(20, 1000)
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode(errors="surrogatepass"))
)
def test_bytes_that_may_be_no_text(content: bytes) -> None:
    def load() -> RunConfig:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "run.yaml").write_bytes(content)
            return check_run(compose("run", (), Path(folder)))

    event(outcome(load))


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
    def load() -> RunConfig:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(dumped(tree).encode(errors="surrogatepass"))
            return check_run(read_config(Path(folder)))

    event(outcome(load))


@fuzzed(30, 1000)
@given(st.lists(ODD_LINES, min_size=1, max_size=3).map("\n".join))
def test_odd_yaml_wherever_it_is_read(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in (CONFIG, "benchmark.yaml"):
            (place / name).write_bytes(text.encode(errors="surrogatepass"))
        event(outcome(lambda: check_run(read_config(place))))
        event(outcome(lambda: read_benchmark(str(place / "benchmark.yaml")).model_dump()))
    event(outcome(loaded, text))


@fuzzed(30, 1000)
@given(MAPPINGS, OVERRIDES)
def test_benchmarks(tree: dict[Any, Any], overrides: list[str]) -> None:
    def load() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "b.yaml"
            file.write_bytes(dumped(tree).encode(errors="surrogatepass"))
            return read_benchmark(str(file), overrides).model_dump()

    event(outcome(load))
