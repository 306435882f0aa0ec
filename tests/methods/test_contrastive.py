"""The contrastive methods by definition: every combination, anchor by anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import ContrastiveTerms, Mixing, NegativeEstimator, contrastive
from solo_ext.methods import negatives as module
from solo_ext.methods.negatives import annealed_beta
from tests.methods.steps import features, gradients, logged_by

Build = Callable[..., Any]
INDICES, TARGETS = torch.tensor([3, 11, 7, 0]), torch.tensor([0, 1, 0, 2])
HARD, MIXES = 3, (5, 4)
ESTIMATES = {"plain": (0.0, 0.0), "hard": (0.1, 0.7)}


class Anchor(NamedTuple):
    """An anchor with its (P, D) positives and the (K, D) candidates that are its negatives."""

    row: Tensor
    positives: Tensor
    candidates: Tensor


class Direction(NamedTuple):
    anchors: list[Anchor]
    share: float
    """Of the loss."""
    mixes: bool


def neighbours(method: Any, keys: list[Tensor]) -> list[Tensor]:
    """(N, k) rows of the support set that are nearest to each key, by comparing with every row."""
    support, settings = method.support_set, method.cfg.method_kwargs.support_set
    found = []
    for key in keys:
        similar = key @ support.value.T
        if settings.exclude_own:
            similar[support.indices == INDICES.unsqueeze(1)] = -9
        found.append(similar.sort(dim=1, descending=True).indices[:, : settings.top_k])
    return found


def positives_of(method: Any, keys: list[Tensor]) -> list[Tensor]:
    """(N, P, D) positives that stand for each large crop."""
    state = method.prototypes
    if method.support_set is not None:
        return [method.support_set.value[rows] for rows in neighbours(method, keys)]
    if state.num_prototypes:
        pairs = zip(state.prototypes, state.assignments[:, INDICES], strict=True)
        return [torch.stack([table[ids] for table, ids in pairs], 1)] * len(keys)
    return [key.unsqueeze(1) for key in keys]


def negatives_in(queue: Any, method: Any, keys: list[Tensor], u: int) -> Iterator[Tensor]:
    """Which rows of the queue are negatives of each image: no other embedding of its positives."""
    kwargs, support = method.cfg.method_kwargs, method.support_set
    for i, image in enumerate(INDICES):
        left = torch.ones(len(queue.value), dtype=torch.bool)
        if kwargs.exclude_own:
            left &= queue.indices != image
        for row in [] if support is None else neighbours(method, keys)[u][i]:
            left &= (queue.indices != support.indices[row]) | (queue.indices < 0)
        yield left


def directions(method: Any, queries: list[Tensor], keys: list[Tensor]) -> Iterator[Direction]:
    """All directions in the order in which mixtures are drawn."""
    kwargs = method.cfg.method_kwargs
    unit = [F.normalize(q, dim=1) for q in queries]
    given, rows = positives_of(method, keys), range(len(INDICES))
    pairs = [(u, v) for u in range(len(keys)) for v in range(len(unit)) if v != u]

    def but(i: int, *tables: Tensor) -> Tensor:
        return torch.stack([table[k] for table in tables for k in rows if k != i])

    if kwargs.negatives == "queue":
        used = range(len(keys)) if kwargs.symmetric else range(1, len(keys))
        for u in used:
            others, queue = [v for v in range(len(unit)) if v != u], method.queues[u]
            past = [queue.value[left] for left in negatives_in(queue, method, keys, u)]
            anchors = [Anchor(unit[v][i], given[u][i], past[i]) for v in others for i in rows]
            yield Direction(anchors, 1 / len(used), True)
    elif kwargs.positives == "nearest_neighbor":
        share = 1 / len(pairs) / kwargs.support_set.top_k / (2 if kwargs.symmetric else 1)
        for u, v in pairs:
            for near in given[u].unbind(1):
                across = [Anchor(near[i], unit[v][i : i + 1], but(i, unit[v])) for i in rows]
                yield Direction(across, share, True)
                if kwargs.symmetric:
                    down = [Anchor(unit[v][i], near[i : i + 1], but(i, near)) for i in rows]
                    yield Direction(down, share, False)
    else:
        anchors = []
        for v, i in ((v, i) for v in range(len(unit)) for i in rows):
            views = torch.stack([z[i] for u, z in enumerate(unit) if u != v])
            positive = views if kwargs.positives == "view" else given[0][i]
            anchors.append(Anchor(unit[v][i], positive, but(i, *unit)))
        yield Direction(anchors, 1.0, True)


def by_definition(
    method: Any, queries: list[Tensor], keys: list[Tensor], draws: list[Any]
) -> tuple[Tensor, dict[str, float]]:
    """The loss, and the metrics, of anchors contrasted one at a time."""
    kwargs, left = method.cfg.method_kwargs, list(draws)
    estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
    loss, seen = torch.zeros(()), list[ContrastiveTerms]()
    for direction in directions(method, queries, keys):
        drawn = left.pop(0) if left and direction.mixes else None
        terms = []
        for number, anchor in enumerate(direction.anchors):
            part = slice(number, number + 1)
            terms.append(
                contrastive(
                    anchor.row.unsqueeze(0),
                    anchor.positives.unsqueeze(0),
                    anchor.candidates,
                    estimator=estimator,
                    mixing=None
                    if drawn is None
                    else Mixing(HARD, MixDraws(*(x[part] for x in drawn))),
                    temperature=kwargs.temperature,
                )
            )
        loss = loss + direction.share * torch.stack([t.loss for t in terms]).mean()
        seen += terms if direction.mixes else []
    assert not left
    names = {"hardness": "hardness"}
    names |= {"clamped": "clamped_fraction"} if kwargs.tau_plus else {}
    names |= {"mined": "mined_similarity", "mixed": "mixed_similarity"} if draws else {}
    means = {k: torch.stack([getattr(t, k) for t in seen]).mean().item() for k in names}
    return loss, {f"train_{name}": means[key] for key, name in names.items()}


@pytest.fixture(autouse=True)
def from_the_hardest_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws count from the hardest negative, not from any order of the same rows."""
    monkeypatch.setattr(module, "Mixing", lambda num, drawn, ranked: Mixing(num, drawn))


def settings(positives: str, negatives: str, estimate: str, mixing: bool) -> dict[str, Any]:
    pairs, singles = MIXES if mixing else (0, 0)
    mixes = {"num_hard": HARD, "num_pair_mixes": pairs, "num_query_mixes": singles}
    tau_plus, beta = ESTIMATES[estimate]
    return {
        "positives": positives,
        "negatives": negatives,
        "queue_size": 9 if negatives == "queue" else None,
        "temperature": 0.5,
        "tau_plus": tau_plus,
        "beta": beta,
        "mixing": {**mixes, "warmup_epochs": 0},
        "support_set": {"size": 12, "top_k": 2},
        "clusters": {"num_prototypes": [3, 4]},
    }


def inputs(views: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Queries of all crops and, of other networks, keys of the two large ones."""
    keys = [F.normalize(z.detach().roll(1, 1) + 0.3 * z.detach(), dim=1) for z in views[:2]]
    return views, keys


@pytest.mark.parametrize("small", [0, 2])
@pytest.mark.parametrize("mixing", [False, True], ids=["", "mixing"])
@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("negatives", ["batch", "queue"])
@pytest.mark.parametrize("positives", ["view", "nearest_neighbor", "prototype"])
def test_loss_is_that_of_each_anchor_by_itself(
    build: Build,
    draws: list[Any],
    positives: str,
    negatives: str,
    estimate: str,
    mixing: bool,
    small: int,
) -> None:
    method = build(small=small, **settings(positives, negatives, estimate, mixing))
    queries, keys = inputs(features(2 + small))
    loss, metrics = method.contrast(queries, keys, INDICES, TARGETS)
    assert bool(draws) == mixing
    expected, terms = by_definition(method, queries, keys, draws)
    torch.testing.assert_close(loss, expected)
    found = gradients(loss, queries), gradients(expected, queries)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert all(bool(g.any()) for g in found[0])
    shown = {k: v for k, v in metrics.items() if k in terms or "_similarity" in k}
    shown.pop("train_nn_similarity", None)
    assert {k: v.item() for k, v in shown.items()} == pytest.approx(terms, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"symmetric": False}, {"detach_weights": True}, {"symmetric": False, "negatives": "queue"}],
    ids=str,
)
def test_options(build: Build, changes: dict[str, Any]) -> None:
    negatives = changes.get("negatives", "batch")
    method = build(**settings("nearest_neighbor", negatives, "hard", False) | changes)
    queries, keys = inputs(features(2))
    loss, _ = method.contrast(queries, keys, INDICES, TARGETS)
    expected, _ = by_definition(method, queries, keys, [])
    torch.testing.assert_close(loss, expected)
    # Against a queue the second view is the key alone.
    used = queries[:1] if negatives == "queue" else queries
    torch.testing.assert_close(gradients(loss, used), gradients(expected, used))


@pytest.mark.parametrize("small", [0, 2])
@pytest.mark.parametrize("mixing", [False, True], ids=["", "mixing"])
def test_own_earlier_keys_of_a_queue_are_left_out(
    build: Build, draws: list[Any], mixing: bool, small: int
) -> None:
    """Neither negatives nor mixed; the fourth image's were overwritten."""
    given = settings("view", "queue", "hard", mixing)
    method = build(small=small, **given, exclude_own=True)
    # As in STL-10, an image without a label is of no class, and of no other's that has none.
    targets = TARGETS.clone()
    targets[0] = -1
    queries, keys = inputs(features(2 + small))
    for queue, key in zip(method.queues, keys, strict=True):
        queue.update_(key.roll(1, 0), INDICES.roll(1), targets)
        queue.update_(-key[:3].repeat(2, 1), INDICES[:3].repeat(2), targets[:3].repeat(2))
    loss, metrics = method.contrast(queries, keys, INDICES, targets)
    expected, terms = by_definition(method, queries, keys, draws)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradients(loss, queries), gradients(expected, queries), rtol=1e-4, atol=1e-6
    )
    assert {k: metrics[k].item() for k in terms} == pytest.approx(terms, rel=1e-4, abs=1e-5)
    if mixing:
        logged = logged_by(method)
        method.on_train_epoch_end()
        same, known = 0, 0
        queue, unit = method.queues[1], F.normalize(queries[0], dim=1)
        for i, image in enumerate(INDICES):
            similar = {j: unit[i] @ queue.value[j] for j in range(9) if queue.indices[j] != image}
            mined = sorted(similar, key=lambda j: -similar[j])[:HARD]
            labels = [int(queue.labels[j]) for j in mined if min(queue.labels[j], targets[i]) >= 0]
            same, known = same + labels.count(int(targets[i])), known + len(labels)
        assert 0 < same < known < 4 * HARD
        assert logged["train_mined_same_class"].item() == pytest.approx(same / known)
        # As with `precision: bf16-true`.
        method.queues.bfloat16()
        method.contrast(queries, keys, INDICES, targets)
        method.on_train_epoch_end()
        assert logged["train_mined_same_class"].item() == pytest.approx(same / known, abs=0.2)
    # A run without this setting has checkpoints without image numbers, as before.
    assert "queues.0.indices" in method.state_dict()
    assert not any("indices" in key for key in build(**given).state_dict())


@pytest.mark.parametrize("epochs", [3, 9, 20, 80, 400])
def test_annealed_beta_is_that_of_the_official_code(epochs: int) -> None:
    """After every ninth of the epochs the next of nine even steps from beta to 0."""
    steps, beta, found = iter([0.7 * (8 - step) / 8 for step in range(9)]), 0.7, list[float]()
    for epoch in range(1, epochs + 1):
        found.append(beta)
        if epoch % max(epochs // 9, 1) == 0:
            # Where epochs are left over, the official code ends with an error.
            beta = next(steps, 0.0)
    assert [annealed_beta(0.7, e, epochs) for e in range(epochs)] == pytest.approx(found)


def test_factors_in_bf16(build: Build) -> None:
    """Near the loss of fp32, and no more than near."""
    queries, keys = inputs(features(2))
    exact, narrow = (
        build(negatives="queue", queue_size=9, compute_dtype=dtype)
        .contrast(queries, keys, INDICES, TARGETS)[0]
        .item()
        for dtype in ("float32", "bfloat16")
    )
    assert narrow == pytest.approx(exact, rel=1e-2)
    assert narrow != pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["", "exclude_own"])
@pytest.mark.parametrize("mixing", [False, True], ids=["", "mixing"])
def test_a_neighbour_s_key_in_a_queue_is_no_negative(
    build: Build, draws: list[Any], mixing: bool, own: bool
) -> None:
    """Support set and first queue hold the same keys: each neighbour is in the queue too."""
    given = settings("nearest_neighbor", "queue", "plain", mixing) | {"exclude_own": own}
    given["support_set"] = {"size": 9, "top_k": 1 if mixing else 2}
    method = build(**given)
    queries, keys = inputs(features(2))
    for images in (INDICES, INDICES.roll(1)):
        for queue, key in zip((method.support_set, *method.queues), keys[:1] + keys, strict=True):
            queue.update_(key, images, TARGETS)
    rows = method.support_set.value[torch.cat(neighbours(method, keys))].flatten(0, 1)
    assert ((rows @ method.queues[0].value.T).amax(1) > 0.999).any()
    loss, _ = method.contrast(queries, keys, INDICES, TARGETS)
    expected, _ = by_definition(method, queries, keys, draws)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradients(loss, queries), gradients(expected, queries), rtol=1e-4, atol=1e-6
    )


def test_rows_of_the_random_start_are_of_no_image(build: Build) -> None:
    """A neighbour among them leaves none of the queue's out."""
    method = build(**settings("nearest_neighbor", "queue", "hard", False))
    queries, keys = inputs(features(2))
    assert (method.support_set.indices == -1).all()
    for queue in method.queues:
        queue.indices.fill_(-1)
    loss, _ = method.contrast(queries, keys, INDICES, TARGETS)
    terms = [
        contrastive(
            F.normalize(queries[1 - u], dim=1),
            method.support_set.value[neighbours(method, keys)[u]],
            method.queues[u].value,
            estimator=method.estimator,
            temperature=0.5,
        )
        for u in range(2)
    ]
    torch.testing.assert_close(loss, (terms[0].loss + terms[1].loss) / 2)


def test_own_earlier_embedding_is_left_out(build: Build) -> None:
    """It is the nearest; the number of the image, not its place in the batch, tells it."""
    queries, keys = inputs(features(2))
    for exclude in (False, True):
        support = {"size": 12, "exclude_own": exclude, "top_k": 2}
        method = build(positives="nearest_neighbor", support_set=support)
        # Both of the image's earlier embeddings, and another image's.
        method.support_set.update_(torch.cat(keys), INDICES.repeat(2), TARGETS.repeat(2))
        loss, metrics = method.contrast(queries, keys, INDICES, TARGETS)
        expected, _ = by_definition(method, queries, keys, [])
        torch.testing.assert_close(loss, expected)
        near = method.support_set.value[torch.cat(neighbours(method, keys))]
        similar = (torch.cat(keys).unsqueeze(1) * near).sum(2).mean()
        torch.testing.assert_close(metrics["train_nn_similarity"], similar)
        assert (metrics["train_nn_own"] > 0.5) == (not exclude)
        assert (metrics["train_nn_own"] == 0) == exclude


@pytest.mark.parametrize(("encoded", "known"), [(None, True), (True, True), (False, False)])
def test_images_without_a_number(build: Build, encoded: bool | None, known: bool) -> None:
    """DALI's batches then count from 0 in every step: no image can be told from another."""
    queries, keys = inputs(features(2))
    given: dict[str, Any] = {}
    if encoded is not None:
        given = {"data": {"format": "dali"}, "dali": {"encode_indexes_into_labels": encoded}}
    method = build(positives="nearest_neighbor", support_set={"size": 8}, **given)
    method.support_set.update_(torch.cat(keys), INDICES.repeat(2), TARGETS.repeat(2))
    _, metrics = method.contrast(queries, keys, INDICES, TARGETS)
    assert ("train_nn_own" in metrics) == known
    assert {"train_nn_acc", "train_nn_similarity"} <= metrics.keys()


def test_neighbours_labels(build: Build) -> None:
    """The share of neighbours with the image's label, where both have one."""
    queries, keys = inputs(features(2))
    method = build(positives="nearest_neighbor", support_set={"size": 8})
    method.support_set.update_(torch.cat(keys), torch.arange(8), torch.tensor([0, 1, 2, 2] * 2))
    _, metrics = method.contrast(queries, keys, INDICES, TARGETS)
    assert metrics["train_nn_acc"] == 0.75
    # Unlabelled images, and neighbours, count neither way.
    _, metrics = method.contrast(queries, keys, INDICES, torch.tensor([0, -1, 0, 2]))
    assert metrics["train_nn_acc"] == pytest.approx(2 / 3)
    method.support_set.labels[0] = method.support_set.labels[4] = -1
    _, metrics = method.contrast(queries, keys, INDICES, torch.tensor([0, -1, 0, 2]))
    assert metrics["train_nn_acc"] == 0.5
    _, metrics = method.contrast(queries, keys, INDICES, torch.full((4,), -1))
    assert metrics["train_nn_acc"] == 0
    near = {"positives": "nearest_neighbor", "support_set": {"size": 8}}
    unlabelled = build(**near, data={"no_labels": True})
    _, metrics = unlabelled.contrast(queries, keys, INDICES, TARGETS)
    assert "train_nn_acc" not in metrics
