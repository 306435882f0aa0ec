"""Official checkpoint layouts: what is read, and what is refused, by name; and other sources."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.pretrained.files import unwrap
from solo_ext.pretrained.libraries import build_architecture
from solo_ext.pretrained.loaded import LoadedTeacher
from solo_ext.pretrained.teachers import load_teacher
from tests.pretrained.conftest import OFFICIAL, refusal

SIZES = {
    "moco_v2": (318, 2048, None),
    "swav": (318, 2048, 3000),
    "dino_resnet50": (318, 2048, 600),
    "dino_deitsmall16": (150, 384, 655),
}
"""Tensors of the backbone, features, prototypes."""
FILE = "file.pth"
MakeOfficial = Callable[..., Any]
Load = Callable[..., LoadedTeacher]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(content, official)``: from a file with this content."""

    def read(content: Any, official: Any) -> LoadedTeacher:
        torch.save(content, tmp_path / FILE)
        return load_teacher(TeacherKwargs(path=str(tmp_path / FILE), **official.source))

    return read


def outputs(teacher: LoadedTeacher, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        feats = teacher.backbone(x)
        return feats, feats if teacher.head is None else teacher.head(feats)


def same(one: LoadedTeacher, other: LoadedTeacher) -> bool:
    x = torch.randn(2, 3, 224, 224)
    pairs = [*zip(outputs(one, x), outputs(other, x), strict=True)]
    if one.prototypes is not None and other.prototypes is not None:
        pairs.append((one.prototypes, other.prototypes))
    return all(torch.equal(a, b) for a, b in pairs)


def shorter(value: Tensor) -> Tensor:
    return value[..., :-1].clone() if value.ndim else value.new_zeros(3)


@pytest.mark.parametrize("name", OFFICIAL)
def test_published_sizes(
    name: str, official: MakeOfficial, published: Callable[[str], Path]
) -> None:
    given, path = official(name), published(name)
    tensors, features, prototypes = SIZES[name]
    assert len(given.network.state_dict()) == tensors
    before = torch.random.get_rng_state()
    teacher = load_teacher(TeacherKwargs(path=str(path), **given.source))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert teacher.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert (teacher.features_dim, teacher.input_size) == (features, 224)
    assert str(teacher.head) == str(given.embed)
    assert teacher.mean == (0.485, 0.456, 0.406)
    assert teacher.std == ((0.228 if name == "swav" else 0.229), 0.224, 0.225)
    x = torch.randn(1, 3, 224, 224) if name == "dino_deitsmall16" else torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = given.network(x)
        feats, z = outputs(teacher, x)
        torch.testing.assert_close(feats, expected)
        torch.testing.assert_close(z, given.embed(expected))
    if prototypes is None:
        assert teacher.prototypes is None
    else:
        assert teacher.prototypes is not None
        assert teacher.prototypes.shape == (prototypes, teacher.embed_dim)
        torch.testing.assert_close(teacher.prototypes, F.normalize(given.rows, dim=1))
        torch.testing.assert_close(teacher.prototypes.norm(dim=1), torch.ones(prototypes))
    assert str(path) in teacher.description


@pytest.mark.parametrize("name", OFFICIAL)
def test_any_key_that_is_odd_is_named(name: str, official: MakeOfficial, load: Load) -> None:
    given = official(name, tiny=True)
    body = [k for k in given.weights if k not in given.head]
    for key in [*given.head, *body[::23]]:
        renamed = key[:-1] + "_" + key[-1]
        # The lengths of weight-normed prototypes are not used.
        spoilt = [] if key.endswith("weight_g") else [shorter(given.weights[key])]
        for says, edit in (
            (renamed, lambda w, k=key, to=renamed: w.update({to: w.pop(k)})),
            *((key, lambda w, k=key, v=value: w.update({k: v})) for value in spoilt),
            ("more.weight", lambda w: w.update({given.inner + "more.weight": torch.ones(2)})),
        ):
            line = refusal(load, given.edited(edit), given)
            assert says in line, (key, line)
    for key in [given.head[0], given.head[2], next(iter(given.weights))]:
        assert key in refusal(load, given.edited(lambda w, k=key: w.pop(k)), given)


@pytest.mark.parametrize("name", OFFICIAL)
def test_with_and_without_parallel_prefix(name: str, official: MakeOfficial, load: Load) -> None:
    given = official(name, tiny=True)
    teacher = load(given.content, given)

    def other_prefix(weights: dict[str, Tensor]) -> None:
        held = dict(weights)
        weights.clear()
        for key, value in held.items():
            bare = key.removeprefix("module.")
            weights[bare if bare != key else f"module.{key}"] = value

    content = given.edited(other_prefix)
    assert same(teacher, load(content, given))

    def one_without(weights: dict[str, Tensor]) -> None:
        key = given.head[0]
        weights[key.removeprefix("module.")] = weights.pop(key)

    if name in ("moco_v2", "swav"):
        assert "unexpected: " in refusal(load, given.edited(one_without), given)


def test_prefixes_are_taken_off_the_start_alone() -> None:
    x = torch.ones(1)
    assert unwrap({"module.a.module.b": x, "module.module.c": x}, "state_dict", "") == (
        "module.",
        {"a.module.b": x, "module.c": x},
    )


def test_other_files_of_moco_v2s_code(official: MakeOfficial, load: Load) -> None:
    given = official("moco_v2", tiny=True)

    def add(weights: dict[str, Tensor]) -> None:
        twin = {k.replace("encoder_q", "encoder_k"): v + 1 for k, v in weights.items()}
        weights.update(twin)
        weights["module.queue"] = torch.zeros(4, 32)
        weights["module.queue_ptr"] = torch.zeros(1, dtype=torch.long)

    full = {**given.edited(add), "optimizer": {"state": {}}}
    assert same(load(given.content, given), load(full, given))
    full["state_dict"]["module.queues"] = torch.zeros(1)
    assert "unexpected: module.queues" in refusal(load, full, given)
    # A classifier is no head.
    plain: dict[str, Tensor] = given.network.state_dict()
    classified = {**plain, "fc.weight": torch.zeros(5, 8), "fc.bias": torch.zeros(5)}
    assert "unexpected: fc.weight, fc.bias" in refusal(load, classified, given)


def test_older_names_and_both_weight_norms(official: MakeOfficial, load: Load) -> None:
    given = official("dino_deitsmall16", tiny=True)
    teacher = load(given.content, given)

    def older(weights: dict[str, Tensor]) -> None:
        held = dict(weights)
        weights.clear()
        for key, value in held.items():
            start, _, rest = key.partition(".")
            weights[f"projection_head.{rest}" if start == "head" else rest] = value

    def newer(weights: dict[str, Tensor]) -> None:
        for number, end in enumerate(("weight_g", "weight_v")):
            value = weights.pop(f"head.last_layer.{end}")
            weights[f"head.last_layer.parametrizations.weight.original{number}"] = value

    for edit in (older, newer):
        assert same(teacher, load(given.edited(edit), given))


@pytest.mark.parametrize("name", OFFICIAL)
def test_backbone_alone(name: str, official: MakeOfficial, load: Load) -> None:
    given = official(name, tiny=True)
    without_head = given.edited(lambda w: [w.pop(k) for k in given.head])
    for content in (without_head, given.network.state_dict()):
        teacher = load(content, given)
        assert teacher.head is None
        assert teacher.prototypes is None
        assert teacher.embed_dim == teacher.features_dim
        assert "no head, no prototypes" in teacher.description
        x = torch.randn(2, 3, 64, 64) if "dino_deit" not in name else torch.randn(2, 3, 224, 224)
        assert torch.equal(outputs(teacher, x)[0], given.network(x))


def test_other_files_of_swavs_code(official: MakeOfficial, load: Load) -> None:
    """Whole states of a training; DeepCluster v2, with several sets of prototypes."""
    given = official("swav", tiny=True)
    wrapped = {"epoch": 800, "state_dict": given.weights, "optimizer": {}, "amp": {}}
    assert same(load(given.content, given), load(wrapped, given))

    def several(weights: dict[str, Tensor]) -> None:
        rows = weights.pop("module.prototypes.weight")
        weights.update({f"module.prototypes.prototypes{i}.weight": rows for i in range(3)})

    teacher = load(given.edited(several), given)
    assert teacher.prototypes is None
    assert teacher.head is not None
    assert "3 sets of prototypes not taken" in teacher.description


def test_architecture_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    network = build_architecture("shufflenet_v2_x0_5", {})
    weights = {f"encoder_q.{k}": v for k, v in network.state_dict().items()}
    source = {"layout": "moco_v2"}
    torch.save({"state_dict": weights}, path)
    named = TeacherKwargs(path=str(path), model="shufflenet_v2_x0_5", **source)
    assert load_teacher(named).description.startswith("shufflenet_v2_x0_5 of MoCo v2 checkpoint")
    with pytest.raises(UserError, match=r"'resnet50' .*name it by method_kwargs\.teacher\.model"):
        load_teacher(TeacherKwargs(path=str(path), **source))


def test_wide_resnets_are_wider_everywhere() -> None:
    plain = build_architecture("resnet50", {}).state_dict()
    with torch.device("meta"):
        wide = build_architecture("resnet50w2", {}).eval()
    assert wide.state_dict().keys() == plain.keys()
    for key, value in wide.state_dict().items():
        first = key == "conv1.weight"
        expected = [
            s * 2 if axis < (1 if first else 2) else s for axis, s in enumerate(plain[key].shape)
        ]
        assert list(value.shape) == expected, key
    assert wide(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 4096)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("moco_v2", {"args": argparse.Namespace(arch="resnet50")}, "argparse.Namespace"),
        ("moco_v2", {"state_dict": {}}, "holds no weights in 'state_dict'"),
        ("moco_v2", {"state_dict": {"a": 3}}, "unexpected: a"),
        ("swav", [1], "holds a list"),
        ("dino_resnet50", {"epoch": 3}, "unexpected: epoch"),
        ("dino_resnet50", {"teacher": {3: torch.ones(1)}}, "unexpected: 3"),
    ],
)
def test_files_that_are_no_checkpoint(
    name: str, content: Any, says: str, official: MakeOfficial, load: Load
) -> None:
    assert says in refusal(load, content, official(name, tiny=True))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("head.last_layer.weight", 0.0, "rows that are zero or not finite"),
        ("backbone.conv1.0.weight", float("nan"), "not finite; is the file damaged?"),
        ("head.mlp.0.bias", float("nan"), "not finite; is the file damaged?"),
    ],
)
def test_damaged_values(
    key: str, value: float, says: str, official: MakeOfficial, load: Load
) -> None:
    given = official("dino_resnet50", tiny=True)

    def spoil(weights: dict[str, Tensor]) -> None:
        weights[key] = weights[key].clone()
        weights[key][0] = value

    assert says in refusal(load, given.edited(spoil), given)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"layout": "moco_v2"}, "path=null: layout moco_v2 needs a file; download https://dl.fb"),
        ({"layout": "swav", "path": "no"}, "swav_800ep_pretrain.pth.tar and name it by method_kw"),
        ({"layout": "dino", "path": "."}, "'.' cannot be read"),
        ({"layout": "run"}, "layout run needs a run directory or checkpoint"),
        ({"layout": "run", "path": "."}, "is no run directory"),
        ({"layout": "run", "path": ".", "model": "resnet18"}, "a run says itself what it is"),
        ({"layout": "swav", "path": FILE, "networks": "momentum"}, "networks='momentum'"),
        ({"layout": "swav", "path": FILE, "model": "timm/resnet81"}, "unknown architecture"),
        (
            {"layout": "swav", "path": FILE, "model": "resnet50", "model_kwargs": {"depth": 3}},
            "unexpected keyword argument 'depth'",
        ),
        ({"layout": "swav", "path": FILE, "model": "squeezenet1_0"}, "ends in no linear layer"),
        ({"layout": "torchvision"}, "model=null: layout torchvision needs a model; for example"),
        ({"layout": "torchvision", "model": "resnet81"}, "did you mean 'resnet18'?"),
        ({"layout": "torchvision", "model": "resnet18:V2"}, "torchvision has no weights 'V2'"),
        ({"layout": "timm", "model": "resnet10"}, "did you mean 'resnet10t'?"),
        ({"layout": "timm", "model": "resnet10t.b7"}, "timm has no weights 'b7'"),
    ],
)
def test_sources_that_do_not_do(
    source: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"conv1.weight": torch.ones(1)}, FILE)
    assert says in refusal(load_teacher, TeacherKwargs(**source))
