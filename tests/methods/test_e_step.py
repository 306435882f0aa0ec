"""E-steps: what is clustered and when, weights of clusters, features on a disk, and errors."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext import clustering
from solo_ext.core.errors import UserError
from solo_ext.memory.heads import ClassWeights
from solo_ext.methods.e_step import EStep, EStepKwargs
from tests.methods.steps import assert_nearest, embedded
from tests.scripts import run_script

Train = Callable[..., dict[str, float]]
HERE, IMAGES = Path(__file__).parent, 48
ARCFACE: dict[str, Any] = {
    "loss": "arcface_loss_func",
    "classes": "cluster",
    "clusters": {"num_prototypes": [4], "warmup_epochs": 0},
}


class Watch(Callback):
    """Notes the bank before every epoch, and at its first batch what the E-step has left."""

    def __init__(self) -> None:
        self.banks: list[tuple[Tensor, Tensor]] = []
        self.seen: list[SimpleNamespace] = []

    def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
        if method.bank is not None:
            self.banks.append((method.bank.value.clone(), method.bank.filled.clone()))
        self.statistics = self.statistics_of_predictor(method)

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        state = method.prototypes
        assert torch.equal(self.statistics_of_predictor(method), self.statistics)
        self.seen.append(
            SimpleNamespace(
                epoch=state.epoch,
                due=state.epoch == trainer.current_epoch,
                assignments=state.assignments.clone(),
                means=[x.clone() for x in state.means],
                prototypes=[x.clone() for x in state.prototypes],
                concentration=[x.clone() for x in state.concentration],
                temperature=getattr(method.kwargs, "temperature", None),
                features=embedded(method, trainer.train_dataloader.dataset.images),
            )
        )

    @staticmethod
    def statistics_of_predictor(method: Any) -> Tensor:
        """Empty without one; it takes no part in an E-step."""
        predictor = getattr(method, "predictor", None)
        return torch.empty(0) if predictor is None else predictor[1].running_mean.clone()


CLUSTERED = {"positives": "prototype", "pred_hidden_dim": 16}
CLUSTERS = {"num_prototypes": [3, 6], "e_step_every": 2}
HIERARCHICAL = {"backend": "hierarchical"}
RUNS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "pcl": ("pcl", {"symmetric": True}, [0, 1, 2]),
    "hierarchical": ("pcl", {"symmetric": True, "kmeans": HIERARCHICAL}, [0, 1, 2]),
    # Without a queue a predictor would have no side until there are prototypes.
    "batch": ("hard_negative", {"clusters": {**CLUSTERS, "warmup_epochs": 0}}, [0, 0, 2, 2]),
    "queue": (
        "hard_negative",
        {
            "negatives": "queue",
            "queue_size": 60,
            "clusters": {**CLUSTERS, "warmup_epochs": 1},
        },
        [-1, 1, 1, 3],
    ),
}
"""Method, settings, and the last E-step at the start of every epoch."""


@pytest.mark.parametrize("case", RUNS)
def test_by_definition(train: Train, case: str) -> None:
    """When it is due, all samples by the keys' networks, each next to its nearest mean."""
    method, kwargs, epochs = RUNS[case]
    watch, more = Watch(), {} if method == "pcl" else CLUSTERED
    train(method, watch, method_kwargs={**more, **kwargs}, max_epochs=len(epochs))
    assert [seen.epoch for seen in watch.seen] == epochs
    due = [seen for seen in watch.seen if seen.due]
    for seen in due:
        assert seen.features.shape == (IMAGES, 8)
        for m, k in enumerate((3, 6)):
            assert seen.means[m].shape == (k, 8)
            assert_nearest(seen.features, seen.means[m], seen.assignments[m])
            unit = F.normalize(seen.means[m], dim=1)
            torch.testing.assert_close(seen.prototypes[m], unit)
            mean = float(seen.concentration[m].mean())
            assert mean == pytest.approx(seen.temperature, rel=0.02)
    assert not torch.equal(due[0].means[1], due[1].means[1])


def test_bank_is_clustered_without_a_pass(train: Train) -> None:
    """What training met comes from the bank; what it did not meet is embedded."""
    watch = Watch()
    kwargs = {"e_step": "bank"}
    train("pcl", watch, method_kwargs=kwargs, optimizer={"batch_size": 20}, max_epochs=2)
    (_, empty), (bank, filled) = watch.banks
    assert not empty.any()
    assert int(filled.sum()) == 40
    cold, warm = watch.seen
    assert cold.epoch == 0, "an empty bank is filled by a pass"
    features = torch.where(filled.unsqueeze(1), bank, warm.features)
    assert_nearest(features, warm.means[0], warm.assignments[0])


@pytest.mark.parametrize("e_step", ["exact", "bank"])
def test_a_sample_is_drawn_anew_in_every_epoch(
    train: Train, monkeypatch: pytest.MonkeyPatch, e_step: str
) -> None:
    """And all images are assigned, with weights that follow their clusters."""
    real, watch, noted = clustering.e_step, Watch(), list[dict[str, Any]]()

    def note(features: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append({"features": features.clone(), **kwargs})
        return real(features, *args, **kwargs)

    monkeypatch.setattr(clustering, "e_step", note)
    settings = {**ARCFACE["clusters"], "e_step": e_step, "e_step_sample": 20}
    logged = train("metric", watch, method_kwargs={**ARCFACE, "clusters": settings}, max_epochs=3)
    assert [given["sample"] for given in noted] == [20] * 3
    assert len({given["sample_seed"] for given in noted}) == 3
    for given, left in zip(noted, watch.seen, strict=True):
        features, (means,), (assigned,) = given["features"], left.means, left.assignments
        assert len(assigned) == IMAGES
        assert_nearest(features, means, assigned)
        # The means are those of some images only.
        of_all = torch.stack([features[assigned == c].mean(0) for c in range(4)])
        assert not torch.allclose(of_all, means, atol=1e-3)
    objective = float((features - means[assigned.long()]).square().sum(1).mean())
    assert logged["e_step/objective_4"] == pytest.approx(objective, rel=1e-3)


class Follow(Callback):
    """Notes class weights, their optimiser's state and the clusters around every E-step."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def note(self, trainer: Any, method: Any) -> dict[str, Tensor]:
        weight = method.criterion.class_weights.weight
        state = trainer.optimizers[0].state.get(weight, {})
        return {
            "weight": weight.detach().clone(),
            "assignments": method.prototypes.assignments[0].clone(),
            **{k: v.clone() for k, v in state.items() if isinstance(v, Tensor)},
        }

    def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
        self.before.append(self.note(trainer, method))

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.after.append(self.note(trainer, method))


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("sgd", {"momentum_buffer"}), ("adam", {"exp_avg", "exp_avg_sq"})],
)
def test_weights_follow_the_clusters(
    train: Train, monkeypatch: pytest.MonkeyPatch, optimizer: str, moments: set[str]
) -> None:
    run, follow = EStep.run, Follow()

    def renumbered(e_step: EStep, method: Any) -> Any:
        """Clusters come in another order each time."""
        metrics, state = run(e_step, method), method.prototypes
        state.assignments = (state.assignments + method.current_epoch) % 4
        return metrics

    monkeypatch.setattr(EStep, "run", renumbered)
    train(
        "metric",
        follow,
        method_kwargs=ARCFACE,
        max_epochs=3,
        optimizer={"name": optimizer, "lr": 0.05},
    )
    for epoch, (before, after) in enumerate(zip(follow.before, follow.after, strict=True)):
        if epoch == 0:
            assert torch.equal(before["weight"], after["weight"])
            continue
        assert moments <= set(before)
        match = ClassWeights(4, 1).rematch_(before["assignments"], after["assignments"])
        for name in ("weight", *moments):
            assert torch.equal(after[name], before[name][match]), name
        assert match.tolist() != [0, 1, 2, 3]


def test_clusters_are_those_of_the_embeddings(train: Train) -> None:
    """From the bank where it is asked for: the mean of the large crops' embeddings."""
    written: list[tuple[Tensor, Tensor]] = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, method: Any, *_: Any) -> None:
            indices = method._step_keys[0]
            # SphereFace's annealing follows it.
            assert method.criterion.step == len(written)
            keys = torch.stack([F.normalize(z, dim=1) for z in method.step_embeddings[:2]]).mean(0)
            mean = F.normalize(keys, dim=1)
            written.append((indices, mean))
            self.bank = method.bank

    steps = Steps()
    kwargs = {**ARCFACE, "clusters": {**ARCFACE["clusters"], "e_step": "bank"}}
    logged = train("metric", steps, method_kwargs=kwargs)
    assert steps.bank.filled.all()
    for indices, mean in written:
        torch.testing.assert_close(steps.bank.value[indices], mean)
    assert "e_step/objective_4" in logged
    assert 0 <= logged["train_class_weight_acc"] <= 1


def files_in(folder: Path) -> list[str]:
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line]


@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_features_lie_in_a_file_that_has_no_name(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str
) -> None:
    """So that nothing of it stays, however the E-step ends."""
    real, seen, folder = clustering.e_step, list[Any](), tmp_path / "new" / "disk"

    def noted(features: Any, *args: Any, **kwargs: Any) -> Any:
        (line,) = files_in(folder)
        begin, end = (int(place, 16) for place in line.split()[0].split("-"))
        assert begin <= features.data_ptr() < end
        assert features.norm(dim=1).allclose(torch.ones(IMAGES))
        seen.append((line, os.listdir(folder)))
        if ends != "well":
            raise ValueError("of k-means")
        return real(features, *args, **kwargs)

    monkeypatch.setattr(clustering, "e_step", noted)
    settings = {**ARCFACE["clusters"], "features_dir": str(folder)}
    kwargs = {**ARCFACE, "clusters": settings}
    if ends == "well":
        train("metric", method_kwargs=kwargs, max_epochs=2)
    else:
        with pytest.raises(UserError, match="ValueError: of k-means"):
            train("metric", method_kwargs=kwargs)
    assert len(seen) == (2 if ends == "well" else 1)
    for line, names in seen:
        assert line.endswith("(deleted)")
        assert names == []
    gc.collect()
    assert files_in(folder) == os.listdir(folder) == []


def test_no_name_is_no_folder() -> None:
    """A variable that is not set would else mean the folder in which the run was started."""
    with pytest.raises(ValueError, match="features_dir"):
        EStepKwargs(features_dir="")


@pytest.mark.slow
@pytest.mark.fault
def test_an_error_while_one_process_embeds_ends_both(tmp_path: Path) -> None:
    """At once, with what went wrong; the other process has not even begun to cluster."""
    words = [
        *("max_epochs=1", "accelerator=cpu", "devices=2", "strategy=ddp", "data.fraction=0.2"),
        *("method_kwargs.warmup_epochs=0", "backbone.kwargs.channels=[8,8,8,8]"),
        *("optimizer.batch_size=30", "limit_train_batches=2", "data.val_path=null"),
        "backbone.kwargs.stem_width=8",
    ]
    environment = {**os.environ, "SOLO_EXT_DATA": str(tmp_path)}
    script = HERE / "pcl_run.py"
    run_script(script, tmp_path, "failing", *words, environment=environment, fails=True)
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert said[1].startswith("OutOfMemoryError: of 9 GiB at ")
    assert said[0].startswith("RankError: rank 1: OutOfMemoryError: of 9 GiB at ")
    first, second = (float(text.rpartition(" ")[2]) for text in said)
    # The process group would have given up after half an hour.
    assert abs(first - second) < 60
    assert time.time() - max(first, second) < 120
