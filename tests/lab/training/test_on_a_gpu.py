"""Whole runs on a GPU: every method in every precision, and stopped and resumed to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.conftest import MakeConfig
from tests.lab.training.resumable import METHODS, STEPS, ReadsTheLoss, config_of
from tests.lab.training.same_run import assert_resumes, assert_same_run, logged, train, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """Networks that are alike share compiled code, of which there may be only so much."""
    torch._dynamo.reset()


@pytest.fixture
def on_gpu(make_config: MakeConfig, make_distilled: MakeConfig) -> MakeConfig:
    """``on_gpu(method, **changes)``: the config of a small run on the GPU."""

    def make(method: str, **changes: Any) -> dict[str, Any]:
        distilled = method.partition("-")[0] in ("seed", "protoseed")
        maker = make_distilled if distilled else make_config
        return config_of(maker, method, accelerator="gpu", **changes)

    return make


@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted(method: str, on_gpu: MakeConfig, tmp_path: Path) -> None:
    assert_resumes(on_gpu(method, deterministic=True), tmp_path, STEPS + 2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_every_precision(method: str, precision: str, on_gpu: MakeConfig, tmp_path: Path) -> None:
    """Shows a loss that is no number in one precision, or a run whose every step is skipped."""
    weights: list[torch.Tensor] = []
    watch = LambdaCallback(
        on_train_start=lambda _, module: weights.append(next(module.backbone.parameters()).clone()),
        on_train_end=lambda _, module: weights.append(next(module.backbone.parameters()).clone()),
    )
    train(on_gpu(method, precision=precision), tmp_path / "run", callbacks=[watch])
    before, after = (w.cpu() for w in weights)
    assert not torch.equal(before, after)
    lines = logged(tmp_path / "run")
    losses = [v for line in lines for k, v in line.items() if k.endswith("loss")]
    assert losses
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("in_memory", [False, "device"])
@pytest.mark.parametrize("method", ["mochi", "pcl"])
def test_crops_on_the_batch(
    method: str, in_memory: bool | str, on_gpu: MakeConfig, tmp_path: Path
) -> None:
    data = {"augmentation": "batch", "in_memory": in_memory}
    assert_resumes(on_gpu(method, deterministic=True, data=data), tmp_path, STEPS)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    "method", ["byol", "metric", "mochi", "pcl-drawn", "protocpc", "seed", "simclr"]
)
def test_graphs(
    method: str,
    accumulated: int,
    on_gpu: MakeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Resumed it is the same run, and graphs compute as the same operations without."""
    given = {"deterministic": True, "accumulate_grad_batches": accumulated}
    config = on_gpu(method, performance={"graphs": True}, **given)
    assert_resumes(config, tmp_path, STEPS + 2)
    assert "performance.graphs" not in caplog.text
    if method != "simclr":
        # Mining and clusters turn rounding into other choices.
        return
    train(on_gpu(method, **given), tmp_path / "plain")
    mine, theirs = weights(tmp_path / "parts"), weights(tmp_path / "plain")
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", ["mochi", "nnclr_symmetric", "swav"])
def test_graphs_with_the_fastest_forms(
    method: str, on_gpu: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which operations time in their first step; SwAV normalises the weights of a layer."""
    kwargs = {"method_kwargs": {"queue_size": 0}} if method == "swav" else {}
    train(on_gpu(method, performance={"graphs": True}, **kwargs), tmp_path / "run")
    assert "performance.graphs" not in caplog.text
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot go on after that")
def test_graphs_that_cannot_be_recorded(
    on_gpu: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The draws of the step that was tried are those of the same run without graphs."""
    mixed = {"num_hard": 6, "num_pair_mixes": 4, "num_query_mixes": 3, "warmup_epochs": 0}
    given = {"method_kwargs": {"mixing": mixed}, "deterministic": True}
    patches = ["momentum-update"]

    train(on_gpu("mochi", patches=patches, **given), tmp_path / "plain", callbacks=[ReadsTheLoss()])
    asked = on_gpu("mochi", patches=patches, performance={"graphs": True}, **given)
    train(asked, tmp_path / "asked", callbacks=[ReadsTheLoss()])
    assert "performance.graphs: a step cannot be recorded" in caplog.text
    assert_same_run(tmp_path / "plain", tmp_path / "asked")


def test_graphs_of_compiled_networks(
    on_gpu: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = {"graphs": True, "compile": True}
    assert_resumes(on_gpu("mochi", deterministic=True, performance=both), tmp_path, STEPS + 2)
    assert "performance.graphs" not in caplog.text


def test_graphs_in_bfloat16_with_a_step_that_is_skipped(
    on_gpu: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"performance": {"graphs": True}, "precision": "bf16-mixed", "on_nonfinite": "skip"}
    poison = LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, number: (
            batch[1][0].fill_(math.inf) if trainer.global_step == number == 2 else None
        )
    )
    train(on_gpu("simclr", **given), tmp_path / "run", callbacks=[poison])
    assert "performance.graphs" not in caplog.text
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
