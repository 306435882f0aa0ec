"""Composing configs: shipped ones, the user's own, overrides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from solo_ext.config.compose import apply_overrides, compose, parse, shipped_configs
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import config_root
from solo_ext.data.transforms import STATISTICS
from solo_ext.lab.training.prepare import prepare
from tests.conftest import need_method

MINE = """
defaults:
  - /solo_ext/augmentations@augmentations: digits
  - _self_
method: simclr
name: mine
backbone: {name: timm/resnet10t, kwargs: {channels: [8, 8, 8, 8]}}
method_kwargs: {proj_hidden_dim: 8, proj_output_dim: 8, temperature: 0.2}
data:
  dataset: custom
  train_path: ${solo_ext.digits:train}
optimizer: {name: sgd, batch_size: 64, lr: 0.3}
scheduler: {name: none}
max_epochs: 2
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with one config of the user's own."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "run.yaml").write_text(MINE)
    return folder


def refusal(*overrides: str, name: str = "digits/debiased", folder: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        compose(name, overrides, folder)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_shipped_configs_are_all_there() -> None:
    root = config_root() / "solo_ext"
    helpers = {"augmentations", "base", "benchmark", "linear", "teachers"}
    files = {p.relative_to(root) for p in root.rglob("*.yaml")}
    runs = {p.with_suffix("").as_posix() for p in files if p.parts[0] not in helpers}
    assert set(shipped_configs()) == runs
    assert "digits/debiased" in runs


@pytest.mark.slow
def test_statistics_in_a_config_apply_to_something() -> None:
    """Data sets with statistics of their own take none from a config."""
    root, applied, given = config_root() / "solo_ext", set(), set()
    texts = {file: file.read_text() for file in root.rglob("*.yaml")}
    stating = {file.stem for file, text in texts.items() if re.search(r"\b(mean|std)\b", text)}
    composed = set()
    for name in shipped_configs():
        file = root / f"{name}.yaml"
        used = re.search(r"@augmentations: (\w+)", texts[file])
        # To compose takes 0.1 s: of what has or names statistics, one of each folder.
        alike = name.partition("/")[0], used and used[1]
        named = {file.stem, *re.findall(r"\w+", texts[file])}
        if not used or alike in composed or not stating & named:
            continue
        cfg = compose(name)
        if any({"mean", "std"} & crop.keys() for crop in cfg["augmentations"]):
            composed.add(alike)
            given.add(used[1])
            if cfg["data"]["dataset"] not in STATISTICS:
                applied.add(used[1])
    assert given == applied != set()


def test_solo_learns_settings_for_imagenet_synchronise_batch_norm() -> None:
    folder = config_root() / "solo_ext" / "imagenet"
    theirs = [p.stem for p in folder.glob("*.yaml") if "# solo-learn's settings" in p.read_text()]
    assert len(theirs) >= 3
    assert all(compose(f"imagenet/{name}")["sync_batchnorm"] for name in theirs)


def of_the_data_at_hand(name: str, root: Path) -> list[str]:
    """Overrides that put ten classes of ten images in the place of data sets nobody ships."""
    folder, _, method = name.partition("/")
    # Before training a teacher only has to be there.
    distilled = method.startswith(("seed", "protoseed"))
    teacher = [f"method_kwargs.teacher.path={root}/cifar10/train/class0/0.png"] if distilled else []
    if folder == "digits":
        return teacher
    paths = [f"data.{s}_path={root}/cifar10/{f}" for s, f in (("train", "train"), ("val", "test"))]
    smaller = ["method_kwargs.num_prototypes=[4,9]"]
    whitened = ("method_kwargs.whitening_size=4", "method_kwargs.proj_output_dim=2")
    return [
        *teacher,
        "optimizer.batch_size=4",
        *(() if folder == "cifar10_cpu" else ("data.dataset=custom", *paths)),
        *(smaller if "/pcl" in name else ()),
        *(("method_kwargs.num_prototypes=[9,9,9]",) if method == "deepclusterv2" else ()),
        *(("method_kwargs.clusters.num_prototypes=[9]",) if "/metric" in name else ()),
        *(("method_kwargs.num_negatives=null",) if name == "imagenet/pcl_v1" else ()),
        # Those for images of one's own expect no labels; these have some. What `auto` computes to
        # find the precision of a machine takes seconds.
        *(("data.no_labels=false", "precision=32-true") if folder == "images" else ()),
        *(whitened if method == "wmse" else ()),
    ]


# Those of a large data set say little that those of digits do not.
READY = [
    pytest.param(name, marks=[] if name.startswith(("digits/", "images/")) else pytest.mark.slow)
    for name in shipped_configs()
]


@pytest.mark.parametrize("name", READY)
def test_shipped_configs_are_ready(name: str, data_root: Path) -> None:
    config = compose(name, of_the_data_at_hand(name, data_root))
    need_method(config["method"])
    assert "hydra" not in config
    prepared = prepare(config)
    assert prepared.run.data.num_classes == 10
    assert prepared.run.name.startswith(config["method"])
    assert prepared.val is not None
    # What was checked and filled in is a config again, and the same.
    assert prepare(prepared.run.model_dump()).run == prepared.run


@pytest.mark.parametrize(
    "name", ["digits/debiased", "digits/debiased.yaml", "solo_ext/digits/debiased"]
)
def test_names_of_shipped_configs(name: str, data_root: Path) -> None:
    assert compose(name) == compose("digits/debiased")


def test_own_config_with_shipped_augmentations(mine: Path, data_root: Path) -> None:
    config = compose("run", (), mine)
    assert config["augmentations"] == compose("digits/simclr")["augmentations"]
    assert Path(config["data"]["train_path"]) == data_root / "digits" / "train"
    assert len(prepare(config).train) == 1400


def test_own_config_in_a_folder(mine: Path, data_root: Path) -> None:
    (mine / "sub").mkdir()
    (mine / "sub" / "run.yaml").write_text("# @package _global_\n" + MINE)
    assert compose("sub/run", (), mine) == compose("run", (), mine)


def test_own_config_overrides_its_defaults(mine: Path, data_root: Path) -> None:
    (mine / "derived.yaml").write_text(
        "defaults:\n  - run\n  - _self_\nmax_epochs: 7\noptimizer: {lr: 0.5}\n"
    )
    (mine / "silent.yaml").write_text("defaults:\n  - run\nmax_epochs: 7\noptimizer: {lr: 0.5}\n")
    derived = compose("derived", (), mine)
    assert (derived["max_epochs"], derived["optimizer"]["lr"]) == (7, 0.5)
    assert derived["optimizer"]["batch_size"] == 64
    assert compose("silent", (), mine) == derived


def test_group_override(data_root: Path) -> None:
    config = compose("digits/debiased", ["solo_ext/augmentations@augmentations=cifar"])
    assert config["augmentations"] == compose("cifar10_cpu/debiased")["augmentations"]


def test_values_are_set_in_order(data_root: Path) -> None:
    config = compose(
        "digits/debiased",
        [
            "optimizer.lr=0.1",
            "optimizer.lr=0.2",
            "+knn_eval.enabled=true",
            "++seed=3",
            "augmentations.0.crop_size=24",
            "backbone.kwargs={drop_rate: 0.5}",
            "~scheduler.warmup_epochs",
            "gradient_clip_val=1.5",
            "name='a,b=c'",
        ],
    )
    assert config["optimizer"]["lr"] == 0.2
    assert config["knn_eval"] == {"enabled": True}
    assert (config["seed"], config["name"]) == (3, "a,b=c")
    assert config["augmentations"][0]["crop_size"] == 24
    # A mapping is merged, as in YAML.
    assert config["backbone"]["kwargs"].items() >= {"drop_rate": 0.5, "small_stem": False}.items()
    assert config["scheduler"] == {"name": "warmup_cosine"}
    assert config["gradient_clip_val"] == 1.5


def test_interpolations_of_overrides_are_resolved(data_root: Path) -> None:
    config = compose("digits/debiased", ["name=${method}-${optimizer.batch_size}"])
    assert config["name"] == "debiased-200"


def test_a_list_loses_an_entry() -> None:
    config = OmegaConf.create({"a": [1, 2, 3], "b": 1})
    apply_overrides(config, parse(["~a.1", "~b=1"]))
    assert config == {"a": [1, 3]}


@pytest.mark.parametrize("override", ["~b=2", "~b=one", "~a.1=3", "~c='x'"])
def test_another_value_is_not_deleted(override: str) -> None:
    config = OmegaConf.create({"a": [1, 2, 3], "b": 1, "c": None})
    key = override.removeprefix("~").partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=.*: is not .*; write ~{key} to delete it"):
        apply_overrides(config, parse([override]))
    assert config == {"a": [1, 2, 3], "b": 1, "c": None}
    apply_overrides(config, parse(["~b=1", "~a.1=2", "~c"]))
    assert config == {"a": [1, 3]}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("name=${nothing}", "name='${nothing}': Interpolation key 'nothing' not found"),
        ("optimizer.lr=${data.nothing}", "optimizer.lr='${data.nothing}': Interpolation key"),
        ("name=${oc.env:SOLO_EXT_NO_SUCH}", "'SOLO_EXT_NO_SUCH' not found"),
        ("name=${no_resolver:1}", "name='${no_resolver:1}': Unsupported interpolation type"),
        ("data.val_path=${solo_ext.digits:vla}", "data.val_path='${solo_ext.digits:vla}': "),
        ("name=${name}", "name='${name}': Recursive interpolation"),
        ("name=???", "name='???': Missing mandatory value"),
        ("backbone.kwargs.channels=[8,${nothing}]", "backbone.kwargs.channels"),
    ],
)
def test_interpolation_errors_are_readable(override: str, says: str, data_root: Path) -> None:
    line = refusal(override)
    assert says in line
    assert "object_type" not in line
    assert "full_key" not in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINE + "seed:\t\n\t- 3\n", "cannot start any token"),
        (MINE + "seed: ${nothing\n", "config 'run' cannot be composed: no viable alternative"),
        ("- a\n", "must be a DictConfig"),
        ("defaults: simclr\n", "defaults must be a list"),
        ("defaults:\n  - run\n  - _self_\n", "maximum recursion depth"),
        (MINE.replace("  - _self_", "  - override /nothing: x\n  - _self_"), "nothing"),
    ],
)
def test_broken_files_are_readable(text: str, says: str, mine: Path, data_root: Path) -> None:
    (mine / "run.yaml").write_text(text)
    assert says in refusal(name="run", folder=mine)


def test_files_that_are_no_text(mine: Path) -> None:
    (mine / "run.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "run.yaml' cannot be read: line 1 is no UTF-8" in refusal(name="run", folder=mine)


@pytest.mark.parametrize("name", ["", "run/", "none", "run.yml"])
def test_names_that_are_no_config(name: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: run"):
        compose(name, (), mine)


def test_hydra_is_left_as_it_was(mine: Path, data_root: Path) -> None:
    """After a mistake the next config composes as if nothing had been."""
    (mine / "torn.yaml").write_text("a: [\n")
    refusal(name="torn", folder=mine)
    assert compose("run", (), mine)["name"] == "mine"


def test_a_file_of_a_group_is_chosen_by_its_name(mine: Path) -> None:
    """As on solo-learn's own command line; other values of the key are values."""
    text = MINE.replace("/solo_ext/augmentations@augmentations: digits", "augmentations: first")
    (mine / "run.yaml").write_text(text)
    (mine / "augmentations").mkdir()
    for name, size in (("first", 16), ("second", 24)):
        (mine / "augmentations" / f"{name}.yaml").write_text(f"- crop_size: {size}\n")
    for words, size in (([], 16), (["augmentations=second"], 24), (["max_epochs=3"], 16)):
        assert compose("run", words, mine)["augmentations"] == [{"crop_size": size}]
    assert compose("run", ["augmentations=third"], mine)["augmentations"] == "third"


def test_a_folder_is_searched_only_for_a_config_that_is_not_there(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a data set of millions of files."""
    assert "did you mean 'run'?" in refusal(name="ran", folder=mine)
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("searched"))
    assert compose("run", [], mine)["name"] == "mine"
