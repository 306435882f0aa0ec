"""``precision: auto``, fused optimisers, ``deterministic: true``, and compiled networks."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from solo_ext.core.errors import ConfigError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.training import cpu_precision
from solo_ext.lab.training.cpu_precision import is_correct_in_bf16
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests import forks
from tests.conftest import MakeConfig
from tests.lab.training.resumable import STEPS, config_of
from tests.lab.training.same_run import (
    assert_resumes,
    assert_same_run,
    command_of,
    logged,
    train,
)

FITTING = {"augmentations": [{"crop_size": 32, "num_crops": 2}], "precision": "auto"}
"""Maps of two pixels or more before every convolution with a stride."""


def has(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    """Makes a processor with these features."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (["avx2"], "32-true"),
        (["avx512_bf16"], "bf16-mixed"),
        (["amx_bf16"], "bf16-mixed"),
        (None, "32-true"),
    ],
)
def test_what_the_processor_has(
    features: list[str] | None,
    expected: str,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.10, the oldest that is supported, cannot tell."""
    if features is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    else:
        has(monkeypatch, *features)
    monkeypatch.setattr(cpu_precision, "is_correct_in_bf16", lambda *_: True)
    assert prepare(make_config("simclr", **FITTING)).run.precision == expected


def test_a_wrong_convolution_is_named(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, "avx512_bf16")
    monkeypatch.setattr(
        cpu_precision, "is_correct_in_bf16", lambda layer, shape, _: shape[1:] != (2, 2)
    )
    with caplog.at_level(logging.INFO):
        assert prepare(make_config("simclr", **FITTING)).run.precision == "32-true"
    (line,) = [r.message for r in caplog.records if r.message.startswith("precision: 32-true")]
    assert "Conv2d" in line
    assert "of 2 x 2 pixels" in line


def test_the_check_meets_every_size(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, "avx512_bf16")
    met: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        cpu_precision, "is_correct_in_bf16", lambda layer, shape, _: met.append(shape) or True
    )
    crops = [{"crop_size": 64, "num_crops": 2}, {"crop_size": 32, "num_crops": 1}]
    prepare(make_config("simclr", **{**FITTING, "augmentations": crops}))
    assert {(3, 64, 64), (3, 32, 32)} <= set(met)
    assert len(met) > len(set(met)), "layers of one input differ"


def test_right_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(4, 8, 3, padding=1)
    assert is_correct_in_bf16(layer, (4, 5, 5))
    assert not is_correct_in_bf16(nn.Conv2d(4, 8, 3), (4, 2, 2)), "no result at all"
    gradients = torch.autograd.grad

    def spoilt(y: torch.Tensor, inputs: Any, towards: torch.Tensor) -> Any:
        of_map, of_weight = gradients(y, inputs, towards)
        return of_map, of_weight * (1.1 if y.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(torch.autograd, "grad", spoilt)
    assert not is_correct_in_bf16(layer, (4, 5, 5))


def test_other_runs_keep_theirs(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_precision, "is_correct_in_bf16", lambda *_: pytest.fail("looked at"))
    assert prepare(make_config("simclr")).run.precision == "32-true"
    given = {**FITTING, "precision": "bf16-mixed"}
    assert prepare(make_config("simclr", **given)).run.precision == "bf16-mixed"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_gradients_that_a_cpu_does_not_write(precision: str, make_config: MakeConfig) -> None:
    """Small crops of 16 pixels reach the last stage as one pixel."""
    crops = [{"crop_size": 32, "num_crops": 2}, {"crop_size": 16, "num_crops": 2}]
    given = {"augmentations": crops, "precision": precision}
    with pytest.raises(ConfigError, match=f"precision='{precision}'.*Conv2d.*take 32-true"):
        prepare(make_config("hard_negative", **given))
    given["augmentations"] = [{"crop_size": 32, "num_crops": 2}, {"crop_size": 20, "num_crops": 2}]
    assert prepare(make_config("hard_negative", **given)).run.precision == precision
    assert prepare(make_config("hard_negative", augmentations=crops)).run.precision == "32-true"


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        ({"name": "sgd"}, "bf16-mixed", True),
        ({"name": "adamw"}, "32-true", True),
        ({"name": "sgd", "kwargs": {"fused": False}}, "bf16-mixed", False),
        ({"name": "sgd"}, "16-mixed", None),
        ({"name": "lars"}, "bf16-mixed", None),
    ],
    ids=str,
)
def test_fused_optimisers_on_a_gpu(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: dict[str, Any],
    precision: str,
    expected: bool | None,
) -> None:
    config = make_config("simclr", optimizer=optimizer, precision=precision)
    assert "fused" not in prepare(make_config("simclr")).run.optimizer.kwargs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = prepare({**config, "accelerator": "gpu"}).run
    assert run.optimizer.kwargs.get("fused") is expected
    assert run.precision == precision


SLOW = ("pcl", "seed")
"""One with a momentum network and E-steps, and one with a teacher: all kinds of networks."""
REST = (
    *("debiased", "hard_negative", "metric", "mochi", "nnclr_symmetric", "protocpc", "protoseed"),
    "simclr",
)


def test_on_a_cpu_it_changes_no_number(make_config: MakeConfig, tmp_path: Path) -> None:
    """Every operation has a deterministic form there, and is one without being asked."""
    train(make_config("pcl"), tmp_path / "plain")
    seen: list[bool] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    config = prepare(make_config("pcl", deterministic=True))
    pretrain(config, run_dir=tmp_path / "asked", callbacks=[watch], show_progress=False)
    assert seen == [True, True]
    assert_same_run(tmp_path / "plain", tmp_path / "asked")


def test_it_is_of_one_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """The next one in the process computes as its own config says."""
    train(make_config("debiased", deterministic=True), tmp_path / "first")
    assert torch.are_deterministic_algorithms_enabled()
    train(make_config("debiased"), tmp_path / "second")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW),
        *(pytest.param(m, marks=pytest.mark.matrix) for m in REST),
    ],
)
def test_traced_and_resumed_it_is_the_same_run(
    method: str, make_config: MakeConfig, make_distilled: MakeConfig, tmp_path: Path
) -> None:
    """With a backend that runs the traced graphs as they are."""
    config = config_of(make_distilled if method in ("seed", "protoseed") else make_config, method)
    compiled = config | {"performance": {"compile": "eager"}}
    assert_resumes(config, tmp_path, STEPS + 2, parts=compiled)


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_compiled_for_the_device_and_resumed_it_is_the_same_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    assert_resumes(
        config_of(make_config, "debiased", performance={"compile": True}), tmp_path, STEPS + 2
    )


def test_graphs_on_a_cpu_change_nothing(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_config("simclr"), tmp_path / "plain")
    train(make_config("simclr", performance={"graphs": True}), tmp_path / "asked")
    assert "performance.graphs: this run trains on a CPU" in caplog.text
    assert_same_run(tmp_path / "plain", tmp_path / "asked")


def test_what_watches_a_compiled_layer_does_not_compile_it_again(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config("simclr", max_epochs=3, log_every_n_steps=2)
    train(config, tmp_path / "plain")
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    def compile_all(trainer: Any, module: Any) -> None:
        for network in module.children():
            network.compile(backend=backend, dynamic=False)

    counts: list[int] = []
    watch = LambdaCallback(
        on_fit_start=compile_all, on_train_batch_end=lambda *_: counts.append(len(compiled))
    )
    train(config, tmp_path / "compiled", callbacks=[watch])
    assert 0 < counts[0] == counts[-1]
    spreads = [
        [line["train_embedding_spread"] for line in logged(run) if "train_embedding_spread" in line]
        for run in (tmp_path / "plain", tmp_path / "compiled")
    ]
    assert spreads[0]
    assert spreads[0] == spreads[1]


@pytest.mark.slow
def test_an_e_step_of_weights_in_bfloat16(make_config: MakeConfig, tmp_path: Path) -> None:
    """Its images are of the type of the weights, as those of a step are."""
    kwargs = {"num_prototypes": [3], "queue_size": 16, "warmup_epochs": 0}
    crops = [{"crop_size": 32, "num_crops": 2}]
    # A worker that is not forked from the run does not know of the precision.
    data = {"num_workers": 1, "start_method": "forkserver"}
    given = {"data": data, "method_kwargs": kwargs, "precision": "bf16-true"}
    config, run = make_config("pcl", augmentations=crops, **given), tmp_path / "run"
    done = forks.run(*forks.SOLO_EXT, *command_of(config, tmp_path, run))
    assert done.returncode == 0, done.stderr[-3000:]
    logged = {k: v for line in read_jsonl(run / "metrics.jsonl") for k, v in line.items()}
    assert 0 < logged["train_proto_nce_loss"] < 10
