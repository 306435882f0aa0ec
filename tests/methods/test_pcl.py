"""The method ``pcl`` on the installed host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.config.check import common_config
from solo_ext.data.transforms import eval_transform, fixed_view
from solo_ext.data.views import FixedViews
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import METRICS
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func
from solo_ext.methods import PCL
from solo_ext.methods.e_step import EStep
from solo_ext.methods.pcl import KEY, PCLKwargs

MakeConfig = Callable[..., dict[str, Any]]
IMAGES, BATCH = 48, 24


class Watch(Callback):
    """Calls back with the method at every E-step and after every batch."""

    def __init__(self, batch_end: Callable[[PCL, Any], None] | None = None) -> None:
        self.seen: list[dict[str, Any]] = []
        self.batch_end = batch_end

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            state = method.prototypes
            self.seen.append(
                {
                    "epoch": trainer.current_epoch,
                    "e_step": state.epoch,
                    "assignments": state.assignments.clone(),
                    "means": [m.clone() for m in state.means],
                    "prototypes": [p.clone() for p in state.prototypes],
                    "concentration": [c.clone() for c in state.concentration],
                    "features": by_hand(method, trainer.train_dataloader.dataset.images),
                }
            )

    def on_train_batch_end(self, trainer: Any, method: Any, *rest: Any) -> None:
        if self.batch_end is not None:
            self.batch_end(method, rest[1])


@torch.no_grad()
def by_hand(method: PCL, images: Any) -> Tensor:
    """Momentum embeddings of all images in order, one at a time."""
    side, statistics = fixed_view(common_config(method.cfg))
    transform = eval_transform(side, *statistics)
    networks = method.momentum_backbone, method.momentum_projector
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    views = FixedViews(images, transform)
    rows = [networks[1](networks[0](views[i][0].unsqueeze(0))) for i in range(len(images))]
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    return F.normalize(torch.cat(rows), dim=1)


def run(config: dict[str, Any], tmp_path: Path, *callbacks: Callback) -> PCL:
    prepared = prepare(config)
    result = pretrain(prepared, run_dir=tmp_path, callbacks=callbacks, show_progress=False)
    assert result.checkpoint is not None
    method = PCL(prepared.cfg)
    method.load_state_dict(torch.load(result.checkpoint, weights_only=True)["state_dict"])
    return method


def made(make_config: MakeConfig, **kwargs: Any) -> Prepared:
    return prepare(make_config("pcl", method_kwargs=kwargs))


def with_prototypes(prepared: Prepared) -> PCL:
    """A method with random prototypes, as after an E-step."""
    torch.manual_seed(0)
    method = PCL(prepared.cfg)
    sizes = method.prototypes.num_prototypes
    means = [torch.randn(k, 8) for k in sizes]
    assignments = [torch.randint(0, k, (IMAGES,)) for k in sizes]
    concentration = [0.1 + torch.rand(k) for k in sizes]
    method.prototypes.update_(0, means, concentration, assignments)
    return method


@pytest.mark.parametrize("head", ["v1", "v2"])
def test_heads(make_config: MakeConfig, head: str) -> None:
    method = PCL(made(make_config, head=head, proj_hidden_dim=None).cfg)
    shapes = [tuple(p.shape) for p in method.projector.parameters()]
    assert shapes == {"v1": [(8, 8), (8,)], "v2": [(8, 8), (8,), (8, 8), (8,)]}[head]
    assert not any("BatchNorm" in type(layer).__name__ for layer in method.projector.modules())
    for one, two in zip(
        method.projector.parameters(), method.momentum_projector.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        assert not two.requires_grad


@pytest.mark.parametrize("backend", ["auto", "hierarchical"])
def test_e_step_by_definition(
    make_config: MakeConfig, images: Path, tmp_path: Path, backend: str
) -> None:
    """Every sample stands at its index, next to its nearest mean; from the momentum encoder."""
    watch = Watch()
    kwargs = {"symmetric": True, "kmeans": {"backend": backend}}
    config = make_config("pcl", method_kwargs=kwargs, max_epochs=3)
    run(config, tmp_path, watch)
    assert [s["e_step"] for s in watch.seen] == [0, 1, 2]
    for seen in watch.seen:
        features = seen["features"]
        assert features.shape == (IMAGES, 8)
        for m, k in enumerate((3, 6)):
            distances = torch.cdist(features, seen["means"][m])
            chosen = distances.gather(1, seen["assignments"][m].long().unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(chosen, distances.amin(1), atol=1e-4, rtol=1e-4)
            assert seen["means"][m].shape == (k, 8)
            unit = F.normalize(seen["means"][m], dim=1)
            torch.testing.assert_close(seen["prototypes"][m], unit)
            assert float(seen["concentration"][m].mean()) == pytest.approx(0.2, rel=0.02)
    assert not torch.equal(watch.seen[0]["means"][1], watch.seen[1]["means"][1])


def test_e_step_is_run_when_it_is_due() -> None:
    for warmup, every, expected in (
        (0, 1, [0, 1, 2, 3]),
        (1, 2, [-1, 1, 1, 3]),
        (9, 1, [-1] * 4),
    ):
        kwargs = PCLKwargs(warmup_epochs=warmup, e_step_every=every)
        e_step = EStep(kwargs, KEY, 8)
        last = []
        for epoch in range(4):
            if e_step.is_due(epoch):
                e_step.prototypes.epoch = epoch
            last.append(e_step.prototypes.epoch)
        assert last == expected


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("drawn", [None, 2])
def test_step_is_the_sum_of_its_terms(
    make_config: MakeConfig, symmetric: bool, drawn: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"proto_weight": 0.3, "num_prototypes": [40, 30], "collisions": "merge"}
    method = with_prototypes(made(make_config, symmetric=symmetric, **settings)).eval()
    # Six samples: more prototypes than the batch has, for the negatives to be drawn from.
    method.kwargs = method.kwargs.model_copy(update={"num_negatives": drawn})
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(method, "log_dict", lambda metrics, **_: logged.update(metrics))
    indices, targets = torch.tensor([5, 40, 7, 0, 33, 12]), torch.tensor([0, 1, 2, 0, 1, 2])
    views = [torch.randn(6, 3, 16, 16) for _ in range(2)]
    loss = method.training_step([indices, views, targets], 0)

    directions = [(0, 1, method.queues[-1])]
    if symmetric:
        directions.append((1, 0, method.queues[0]))
    outs = [method(view) for view in views]
    z = [method.projector(out["feats"]) for out in outs]
    keys = [F.normalize(method.embed(view), dim=1) for view in views]
    info = [info_nce_loss_func(z[q], keys[k], queue.value, 0.2) for q, k, queue in directions]
    proto = []
    every = method.prototypes.of(indices)
    of_all = method._negatives(every, method.draw_seed(0))
    for m, ids in enumerate(every):
        negatives = None if of_all is None else of_all[m]
        if drawn is not None:
            assert negatives is not None
            assert len(set(negatives.tolist()) - set(ids.tolist())) == drawn
        proto += [
            proto_nce_loss_func(
                z[q],
                method.prototypes.prototypes[m],
                method.prototypes.concentration[m],
                ids,
                negatives,
                "merge",
            )
            for q, _, _ in directions
        ]
    classify = [F.cross_entropy(outs[q]["logits"], targets) for q, _, _ in directions]
    expected = sum(info) / len(info) + 0.3 * sum(proto) / len(proto)
    expected = expected + sum(classify) / len(classify)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logged["train_proto_nce_loss"], sum(proto) / len(proto))
    assert {"train_proto_acc_40", "train_collisions_30", "train_info_nce_loss"} <= set(logged)


@pytest.mark.parametrize("symmetric", [True, False])
def test_online_classifier_and_knn_see_the_queries(
    make_config: MakeConfig, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host's step does with each view, done for each view that is a query."""
    config = make_config("pcl", method_kwargs={"symmetric": symmetric}, knn_eval={"enabled": True})
    method = PCL(prepare(config).cfg).eval()
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(method, "log_dict", lambda metrics, **_: logged.update(metrics))
    targets, views = torch.tensor([0, 1, 2, 0]), [torch.randn(4, 3, 16, 16) for _ in range(2)]
    method.training_step([torch.arange(4), views, targets], 0)
    outs = [method(view) for view in views[: 2 if symmetric else 1]]
    losses = [F.cross_entropy(out["logits"], targets) for out in outs]
    torch.testing.assert_close(logged["train_class_loss"], sum(losses) / len(losses))
    assert {"train_acc1", "train_acc5"} <= set(logged)
    stored = torch.cat(list(method.knn.train_features))
    torch.testing.assert_close(stored, torch.cat([out["feats"] for out in outs]).detach())
    assert len(torch.cat(list(method.knn.train_targets))) == len(stored)


def test_gradients_go_to_the_online_networks_alone(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("pcl", method_kwargs={"symmetric": True})
    config["backbone"]["kwargs"]["zero_init_last"] = False
    method = with_prototypes(prepare(config))
    monkeypatch.setattr(method, "log_dict", lambda *_, **__: None)
    views = [torch.randn(6, 3, 16, 16) for _ in range(2)]
    method.training_step([torch.arange(6), views, torch.zeros(6).long()], 0).backward()
    for name, parameter in method.named_parameters():
        learns = not name.startswith("momentum")
        assert (parameter.grad is not None and bool(parameter.grad.any())) == learns, name


def test_queue_and_bank_take_the_step_s_keys(make_config: MakeConfig, tmp_path: Path) -> None:
    """Row by index in the bank, in order in the queue; after the step, not before."""
    steps: list[tuple[Tensor, list[Tensor]]] = []

    def note(method: PCL, batch: Any) -> None:
        # Callbacks run before the method's own hook: the keys are not written yet.
        assert method._written is not None
        indices, keys = method._written
        assert torch.equal(indices, batch[0])
        assert not (method.queues[0].value.unsqueeze(0) == keys[0].unsqueeze(1)).all(2).any()
        steps.append((indices.clone(), [k.clone() for k in keys]))

    kwargs = {"e_step": "bank", "symmetric": True, "warmup_epochs": 9, "queue_size": 60}
    method = run(make_config("pcl", method_kwargs=kwargs, max_epochs=2), tmp_path, Watch(note))
    assert len(steps) == 4
    for view, queue in enumerate(method.queues):
        written = torch.cat([keys[view] for _, keys in steps])
        assert torch.equal(queue.value, expected_ring(written, 60))
        assert queue.pointer == 96 % 60
    assert method.bank is not None
    assert method.bank.filled.all()
    for index, keys in last_keys(steps).items():
        expected = F.normalize(torch.stack(keys).mean(0), dim=0)
        torch.testing.assert_close(method.bank.value[index], expected)


def expected_ring(written: Tensor, size: int) -> Tensor:
    ring = torch.empty(size, written.shape[1])
    for place, row in enumerate(written):
        ring[place % size] = row
    return ring


def last_keys(steps: list[tuple[Tensor, list[Tensor]]]) -> dict[int, list[Tensor]]:
    return {
        int(index): [key[row] for key in keys]
        for indices, keys in steps
        for row, index in enumerate(indices)
    }


def test_bank_is_clustered_without_a_pass(make_config: MakeConfig, tmp_path: Path) -> None:
    """What training met comes from the bank; what it did not meet is embedded."""
    banks: list[tuple[Tensor, Tensor]] = []

    def note(method: PCL, batch: Any) -> None:
        assert method.bank is not None
        banks.append((method.bank.value.clone(), method.bank.filled.clone()))

    class Before(Callback):
        def on_train_epoch_start(self, trainer: Any, method: Any) -> None:
            banks.append((method.bank.value.clone(), method.bank.filled.clone()))

    watch, before = Watch(), Before()
    config = make_config("pcl", method_kwargs={"e_step": "bank"}, max_epochs=2)
    config["optimizer"]["batch_size"] = 20
    run(config, tmp_path, watch, before)
    (_, empty), (bank, filled) = banks
    assert not empty.any()
    assert int(filled.sum()) == 40
    cold, warm = watch.seen
    assert cold["e_step"] == 0, "an empty bank is filled by a pass"
    features = torch.where(filled.unsqueeze(1), bank, warm["features"])
    distances = torch.cdist(features, warm["means"][0])
    chosen = distances.gather(1, warm["assignments"][0].long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, distances.amin(1), atol=1e-4, rtol=1e-4)


def test_records(make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="solo_ext"):
        run(make_config("pcl", method_kwargs={"num_prototypes": [3, 40, 3]}), tmp_path)
    (line,) = [
        record
        for record in map(json.loads, (tmp_path / METRICS).read_text().splitlines())
        if "e_step/objective_3" in record
    ]
    for name in ("3", "40", "3_2"):
        for key in ("objective", "empty", "singletons", "nmi"):
            assert line[f"e_step/{key}_{name}"] >= 0
        low, mean, high = (line[f"e_step/concentration_{k}_{name}"] for k in ("min", "mean", "max"))
        assert 0 < low <= mean <= high
        assert mean == pytest.approx(0.2, rel=0.02)
        assert 0 <= line[f"train_proto_acc_{name}"] <= 1
        assert 0 <= line[f"train_collisions_{name}"] <= 1
    assert line["e_step/singletons_40"] > 20
    assert line["train_collisions_3"] > line["train_collisions_40"]
    (message,) = [m for m in caplog.messages if not m.startswith("patches of solo-learn")]
    assert message.startswith("E-step before epoch 1: 3+40+3 prototypes by torch k-means")


def test_prototypes_that_are_never_used_are_a_warning(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_config("pcl", method_kwargs={"warmup_epochs": 1}), tmp_path)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "method_kwargs.warmup_epochs=1 of max_epochs=1: the prototypes will never be used"
    ]


def test_all_state_is_kept_out_of_ddp_s_broadcast(make_config: MakeConfig) -> None:
    method = PCL(made(make_config, e_step="bank", symmetric=True).cfg)
    kept_out = set(method._ddp_params_and_buffers_to_ignore)
    state = ("queues.", "prototypes.", "bank.")
    assert kept_out == {name for name, _ in method.named_buffers() if name.startswith(state)}
    assert len(kept_out) == 2 + 3 * 2 + 1 + 2


@pytest.mark.parametrize("num_negatives", [None, 4])
def test_products_in_bfloat16(make_config: MakeConfig, num_negatives: int | None) -> None:
    """With queue and with prototypes, in both directions."""
    found: dict[str, dict[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    queries, keys = (
        F.normalize(torch.randn(2, BATCH, 8, generator=generator), dim=2) for _ in range(2)
    )
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        kwargs = {"num_negatives": num_negatives, "num_prototypes": [40, 48], "symmetric": True}
        method = with_prototypes(made(make_config, compute_dtype=dtype, **kwargs))
        indices = torch.arange(BATCH)
        _, found[dtype] = method.contrast(list(queries), list(keys), indices)
    for name in ("train_info_nce_loss", "train_proto_nce_loss"):
        exact, narrow = (found[dtype][name] for dtype in ("float32", "bfloat16"))
        assert not torch.equal(exact, narrow), name
        torch.testing.assert_close(exact, narrow, rtol=5e-3, atol=0)


def test_step_s_loss_runs_on_meta_tensors(make_config: MakeConfig, on_meta: Any) -> None:
    """No value is asked for: no synchronisation with the host in a step."""
    for kwargs in ({}, {"num_negatives": 4, "num_prototypes": [40, 48], "symmetric": True}):
        prepared = made(make_config, **{"e_step": "bank", **kwargs})
        method = with_prototypes(prepared).to("meta")
        views = len(method.queues)
        z = [torch.empty(BATCH, 8, device="meta", requires_grad=True) for _ in range(views)]
        indices = torch.empty(BATCH, dtype=torch.long, device="meta")
        with on_meta:
            loss, _ = method.contrast(z, [x.detach() for x in z], indices)
            loss.backward()
        assert loss.device.type == "meta"
        assert method.bank is not None
        method.bank.resize_(IMAGES)
        method.bank.update_(indices, z[0])
        method.queues[0].update_(z[0])
