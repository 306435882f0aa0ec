"""The schema: what it fills in, passes on and refuses, in one line."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from solo_ext.config.check import check_method_kwargs, check_run, trainer_arguments
from solo_ext.core.errors import ConfigError, UserError, suggest_name
from solo_ext.core.types import PositiveInt, ProbabilityBelowOne, Section
from tests.config.conftest import VALID


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Sets a value at a dotted path, in place."""
    *parents, last = path.split(".")
    node: Any = config
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return config


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    return str(caught.value)


def test_defaults_are_filled_in(valid: dict[str, Any]) -> None:
    filled = check_run(valid).model_dump()
    assert filled["seed"] == 5
    assert filled["loggers"] == []
    assert filled["knn_eval"] == {"enabled": False, "k": 20, "distance_func": "cosine"}
    assert filled["momentum"] == {"base_tau": 0.9, "final_tau": 1.0, "classifier": False}
    assert filled["augmentations"][0]["rrc"] == {
        "enabled": True,
        "crop_min_scale": 0.2,
        "crop_max_scale": 1.0,
    }
    assert filled["optimizer"]["classifier_lr"] == 0.1
    assert filled["auto_umap"] is None


def test_filled_config_is_a_fixed_point_and_its_own(valid: dict[str, Any]) -> None:
    filled = check_run(valid)
    assert check_run(filled.model_dump()) == filled
    filled.loggers.append("tensorboard")
    assert check_run(valid).loggers == []


def test_trainer_arguments_pass_through(valid: dict[str, Any]) -> None:
    passed = {"gradient_clip_val": 1.0, "limit_train_batches": 0.5}
    filled = check_run(valid).model_dump()
    assert {k: filled[k] for k in passed} == passed
    # What was not given is not written: Lightning's own defaults hold.
    assert "deterministic" not in filled
    assert check_run({**valid, "deterministic": None}).model_dump()["deterministic"] is None


@pytest.mark.parametrize(
    "passed",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 1.0},
        {"val_check_interval": 0.25},
        {"val_check_interval": "00:00:10:00"},
        {"val_check_interval": {"minutes": 5}},
        {"max_time": "00:12:00:00"},
        {"max_time": {"hours": 2}},
        {"max_steps": -1},
        {"deterministic": "warn"},
        {"fast_dev_run": 2},
        {"profiler": "simple"},
        {"gradient_clip_algorithm": "norm"},
        {"num_sanity_val_steps": -1},
        {"plugins": None},
        {"precision": 32},
        {"precision": "bf16"},
        {"devices": "auto"},
        {"devices": 2},
        {"benchmark": True},
        {"check_val_every_n_epoch": None},
    ],
    ids=str,
)
def test_what_the_trainer_takes_is_taken(passed: dict[str, Any], valid: dict[str, Any]) -> None:
    assert check_run({**valid, **passed}).model_dump().items() >= passed.items()


OURS = {"self", "logger", "callbacks", "default_root_dir", "enable_checkpointing"}


def test_arguments_are_those_of_the_trainer() -> None:
    """Read from its file, and by an import."""
    assert set(trainer_arguments()) == inspect.signature(Trainer.__init__).parameters.keys() - OURS


def test_an_unknown_key_names_the_page_of_all(valid: dict[str, Any]) -> None:
    said = refusal({**valid, "max_epoch": 1})
    assert "did you mean 'max_epochs'?" in said
    assert said.endswith("every key: docs/reference/config.md")


@pytest.mark.parametrize("name", ["logger", "callbacks", "default_root_dir"])
def test_what_is_ours_is_no_argument(name: str, valid: dict[str, Any]) -> None:
    assert name not in trainer_arguments()
    assert f"{name}='x': unknown key" in refusal({**valid, name: "x"})


@pytest.mark.parametrize(
    ("path", "guess"),
    [
        ("metod", "method"),
        ("sync_batchnorn", "sync_batchnorm"),
        ("backbone.nam", "name"),
        ("data.train_pth", "train_path"),
        ("augmentations.0.crop_sizes", "crop_size"),
        ("augmentations.0.rrc.enable", "enabled"),
        ("augmentations.0.color_jitter.saturation_", "saturation"),
        ("optimizer.learning_rate", None),
        ("scheduler.warmup-epochs", "warmup_epochs"),
        ("momentum.base_tua", "base_tau"),
        ("online_eval.protocol", "protocols"),
        ("wandb.Entity", "entity"),
    ],
)
def test_unknown_keys_are_named(path: str, guess: str | None, valid: dict[str, Any]) -> None:
    line = refusal(put(valid, path, 1))
    assert line.startswith(f"{path}=1: unknown key; ")
    assert "allowed: " in line
    assert ("did you mean" in line) == (guess is not None)
    if guess:
        assert f"did you mean {guess!r}? " in line
    # At most five, of which the nearest is the first, and where the others stand.
    listed = line.partition("allowed: ")[2].partition("; every key: ")
    names = [name for name in listed[0].split(", ") if not name.startswith("...")]
    assert len(names) <= 5
    if listed[1]:
        assert listed[2] == "docs/reference/config.md"
        assert guess in (names[0], None)


def test_a_misspelt_key_is_named_rather_than_the_missing_one(valid: dict[str, Any]) -> None:
    valid["optimizer"]["learning_rate"] = valid["optimizer"].pop("lr")
    assert refusal(valid).startswith("optimizer.learning_rate=0.1: unknown key")


@pytest.mark.parametrize("key", [3, True, None, 1.5, ("a", "b")])
def test_keys_that_are_no_text(key: Any, valid: dict[str, Any]) -> None:
    for section in (valid, valid["optimizer"], valid["backbone"]["kwargs"]):
        section[key] = 1
        assert "this key is no text" in refusal(valid)
        assert str(key).lower().replace("none", "null") in refusal(valid)
        del section[key]


@pytest.mark.parametrize("key", ["int", "str", "list[int]", "[key]", "constrained-int", ""])
def test_keys_named_like_branches_of_unions(key: str, valid: dict[str, Any]) -> None:
    assert refusal({**valid, key: 1}).startswith(f"{key}=1: unknown key")
    valid["optimizer"][key] = 1
    assert refusal(valid).startswith(f"optimizer.{key}=1: unknown key")


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("scheduler.interval", "steps", "not a valid choice; did you mean 'step'?"),
        ("scheduler.interval", 3, "not a valid choice; allowed: epoch, step"),
        ("precision", 8, "not a valid choice; allowed: 16, 16-mixed"),
        ("data.fraction", 0, "not a valid value; allowed: -1, or greater than 0"),
        ("data.fraction", "half", "not a valid value; allowed: -1, or a valid number"),
        ("devices", [], "not a valid value; allowed: a valid integer, or a valid string, or"),
        ("devices", 0, "not a valid value; allowed: greater than 0, or a valid string, or a valid"),
        ("resume_from_checkpoint", 3, "not a valid value; allowed: a valid string"),
        ("momentum", 0.9, "not a valid value; allowed: a mapping"),
        ("method_kwargs", 0.9, "not a valid value; allowed: a mapping"),
        ("augmentations", [], "not a valid value; allowed: at least 1 item"),
        ("augmentations.0", None, "not a valid value; allowed: a mapping"),
        ("augmentations.0.mean", [0.5], "not a valid value; allowed: at least 3 items"),
        ("augmentations.0.mean.1", "x", "not a valid value; allowed: a valid number"),
        ("scheduler.lr_decay_steps.1", 0, "not a valid value; allowed: greater than 0"),
        (
            "online_eval.protocols.0",
            "nn",
            "not a valid choice; did you mean 'knn'? allowed: clustering",
        ),
        ("optimizer.lr", float("nan"), "not a valid value; allowed: a finite number"),
        ("limit_train_batches", 1.5, "not a valid value; allowed: a valid integer, or less than"),
        ("check_val_every_n_epoch", 0, "not a valid value; allowed: greater than 0"),
        ("plugins", "x", "not a valid value; allowed: None"),
        ("deterministic", "no", "not a valid value; allowed: a valid boolean, or 'warn'"),
    ],
)
def test_values_are_refused(path: str, value: Any, line: str, valid: dict[str, Any]) -> None:
    said = refusal(put(valid, path, value))
    assert said.startswith(f"{path}={value!r}: {line}".replace("=None:", "=null:"))


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a\nb"], ids=["long", "NUL", "lines"])
def test_names_that_no_file_can_have(name: str, valid: dict[str, Any]) -> None:
    assert refusal({**valid, "name": name}).startswith("name='")


def test_long_values_are_cut(valid: dict[str, Any]) -> None:
    assert len(refusal({**valid, "nonsense": list(range(1000))})) < 500


def test_errors_are_one_line() -> None:
    assert str(UserError("a\n  b\u2028c")) == "a b c"
    assert str(ConfigError("key", "x\ny", "not\ngood", "mend\r\nit")) == (
        "key='x\\ny': not good; mend it"
    )
    assert str(ConfigError("key", None, "bad")) == "key=null: bad"
    assert str(ConfigError("key", False, "bad")) == "key=false: bad"
    assert str(ConfigError("key", 0, "bad")) == "key=0: bad"


def test_nearest() -> None:
    names = ("simclr", "simsiam", "byol")
    assert suggest_name("SimCLR", names) == "did you mean 'simclr'? allowed: byol, simclr, simsiam"
    assert suggest_name("simsia", names, show=2) == (
        "did you mean 'simsiam'? allowed: simsiam, simclr, ... (3 in all)"
    )
    assert suggest_name("byoll", names, show=0) == "did you mean 'byol'?"
    assert suggest_name("qq", names, show=0) == ""
    assert suggest_name("x", ()) == "nothing is allowed here"


GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30, max_value=10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["int", "auto", "-1", "custom", "???", "a\nb"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a nested config."""
    found: list[tuple[Any, Any]] = []
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, inner in list(pairs):
        found.append((node, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_garbage_is_refused_in_one_line(data: st.DataObject) -> None:
    """Anything but a config error would be a traceback on the user's screen."""
    config = copy.deepcopy(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = data.draw(st.sampled_from(places(config)))
        match data.draw(st.sampled_from(["replace", "add", "rename", "remove"])):
            case "replace":
                node[key] = data.draw(GARBAGE)
            case "add" if isinstance(node, dict):
                node[data.draw(st.text(max_size=5) | st.integers() | st.none())] = data.draw(
                    GARBAGE
                )
            case "rename" if isinstance(node, dict):
                node[data.draw(st.text(max_size=12))] = node.pop(key)
            case "remove":
                del node[key]
    refused: ConfigError | None = None
    try:
        filled = check_run(config).model_dump()
    except ConfigError as error:
        refused = error
    if refused is None:
        assert check_run(filled).model_dump() == filled or "nan" in repr(filled)
    else:
        assert len(str(refused).splitlines()) == 1
        assert refused.key in str(refused) or not refused.key.isprintable()


class Kwargs(Section):
    dim: PositiveInt
    share: ProbabilityBelowOne = 0.1
    sizes: list[PositiveInt] | None = None
    kind: Literal["a", "bee"] = "a"


def test_method_kwargs_are_filled() -> None:
    filled = check_method_kwargs(Kwargs, {"dim": 3, "sizes": [1]})
    assert filled.model_dump() == {"dim": 3, "share": 0.1, "sizes": [1], "kind": "a"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "method_kwargs.dim=null: this key is required; give it a value"),
        ({"dim": 0}, "method_kwargs.dim=0: not a valid value; allowed: greater than 0"),
        ({"dim": 1.0}, "method_kwargs.dim=1.0: not a valid value; allowed: a valid integer"),
        ({"dim": True}, "method_kwargs.dim=true: not a valid value; allowed: a valid integer"),
        ({"dim": 1, "share": 1}, "method_kwargs.share=1: not a valid value; allowed: less than 1"),
        (
            {"dim": 1, "sizes": [1, "x"]},
            "method_kwargs.sizes.1='x': not a valid value; allowed: a valid integer",
        ),
        (
            {"dim": 1, "kind": "be"},
            "method_kwargs.kind='be': not a valid choice; did you mean 'bee'? allowed: a, bee",
        ),
        (
            {"dim": 1, "shar": 0.5},
            "method_kwargs.shar=0.5: unknown key; did you mean 'share'? "
            "allowed: dim, kind, share, sizes",
        ),
    ],
)
def test_method_kwargs_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_method_kwargs(Kwargs, given)
    assert str(caught.value) == line


def test_settings_of_a_method_that_are_no_pydantic_class() -> None:
    @dataclass
    class Kwargs:
        temperature: float = 0.2

    with pytest.raises(UserError, match=r"Kwargs .* derive it from solo_ext\.core\.types\.Section"):
        check_method_kwargs(Kwargs, {})  # type: ignore[type-var]
