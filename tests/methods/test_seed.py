"""SEED and the baselines in its frame, on given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from solo_ext.losses import NegativeEstimator, contrastive, info_nce_loss_func, seed_loss_func
from tests.methods.steps import embeddings

Build = Callable[..., Any]
SIDE, ROWS = 16, 6
SMALL = [{"crop_size": SIDE, "num_crops": 1}, {"crop_size": 8, "num_crops": 2}]
TWO = [{"crop_size": SIDE, "num_crops": 2}]


@pytest.fixture
def build(make_method: Build) -> Build:
    """``build(augmentations=None, **method_kwargs)``."""

    def make(augmentations: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("loss", "seed") != "seed":
            kwargs["teacher_temperature"] = None
        return make_method("seed", augmentations, **kwargs)

    return make


def test_is_the_loss_of_the_paper(build: Build) -> None:
    method = build(student_temperature=0.2, teacher_temperature=0.05)
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, metrics = method.distill([student], [teacher])
    queue = method.queues[0].value
    torch.testing.assert_close(loss, seed_loss_func(student, teacher, queue, 0.2, 0.05))
    s, t = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    table = torch.cat([t.unsqueeze(1), queue.expand(ROWS, *queue.shape)], 1)
    target = torch.einsum("nd,nkd->nk", t, table).div(0.05).softmax(1)
    plain = -(target * torch.einsum("nd,nkd->nk", s, table).div(0.2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(metrics["train_target_own"], target[:, 0].mean())
    entropy = torch.special.entr(target).sum(1).mean()
    torch.testing.assert_close(metrics["train_target_entropy"], entropy)
    torch.testing.assert_close(metrics["train_teacher_similarity"], (s * t).sum(1).mean())


def test_two_large_crops_are_each_their_own_target(build: Build) -> None:
    method = build(TWO)
    students, teachers = embeddings(2), embeddings(2, 2)
    loss, _ = method.distill(students, teachers)
    queue = method.queues[0].value
    each = [seed_loss_func(s, t, queue, 0.2, 0.05) for s, t in zip(students, teachers, strict=True)]
    torch.testing.assert_close(loss, torch.stack(each).mean())
    assert len(method._step_keys) == 1
    torch.testing.assert_close(method._step_keys[0], F.normalize(teachers[0], dim=1))


def test_small_patches_have_targets_and_a_queue_of_their_own(build: Build) -> None:
    method = build(SMALL, small_weight=0.5)
    assert method.num_targets == 3
    students, teachers = embeddings(3), embeddings(3, 2)
    loss, _ = method.distill(students, teachers)
    queues = [q.value for q in method.queues]
    assert not torch.equal(*queues)
    large = seed_loss_func(students[0], teachers[0], queues[0], 0.2, 0.05)
    small = [
        seed_loss_func(s, t, queues[1], 0.2, 0.05)
        for s, t in zip(students[1:], teachers[1:], strict=True)
    ]
    torch.testing.assert_close(loss, large + 0.5 * torch.stack(small).mean())
    method.on_train_batch_end(None, None, 0)
    for place, number in ((0, 0), (1, 1)):
        written = method.queues[place].value[:ROWS]
        torch.testing.assert_close(written, F.normalize(teachers[number], dim=1))
        assert method.queues[place].pointer == ROWS


def test_small_crops_that_learn_of_large_ones(build: Build) -> None:
    method = build(SMALL, small_crop_target="large")
    assert method.num_targets == 1
    assert len(method.queues) == 1
    students, (teacher,) = embeddings(3), embeddings(1, 2)
    loss, _ = method.distill(students, [teacher])
    queue = method.queues[0].value
    each = [seed_loss_func(s, teacher, queue, 0.2, 0.05) for s in students]
    torch.testing.assert_close(loss, each[0] + torch.stack(each[1:]).mean())


def test_regression(build: Build) -> None:
    method = build(loss="regression")
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    difference = F.normalize(student, dim=1) - F.normalize(teacher, dim=1)
    torch.testing.assert_close(loss, difference.square().sum(1).mean())
    assert not len(method.queues)


def test_contrastive_with_a_queue_is_info_nce(build: Build) -> None:
    method = build(loss="contrastive", student_temperature=0.3)
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    expected = info_nce_loss_func(student, teacher, method.queues[0].value, 0.3)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("settings", [{}, {"tau_plus": 0.1}, {"tau_plus": 0.1, "beta": 1.0}])
def test_contrastive_within_the_batch(settings: dict[str, float], build: Build) -> None:
    """The other images' embeddings of the teacher are the negatives, by any estimate."""
    method = build(loss="contrastive", negatives="batch", student_temperature=0.5, **settings)
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, metrics = method.distill([student], [teacher])
    s, t = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    each = []
    for i in range(ROWS):
        others = torch.cat([t[:i], t[i + 1 :]])
        estimator = NegativeEstimator(settings.get("tau_plus", 0.0), settings.get("beta", 0.0))
        terms = contrastive(
            s[i : i + 1], t[i : i + 1].unsqueeze(1), others, estimator=estimator, temperature=0.5
        )
        each.append(terms.loss)
    torch.testing.assert_close(loss, torch.stack(each).mean())
    assert ("train_clamped_fraction" in metrics) == bool(settings)


def test_mixed_negatives(build: Build) -> None:
    mixing = {"num_hard": 5, "num_pair_mixes": 4, "num_query_mixes": 2, "warmup_epochs": 0}
    method = build(loss="contrastive", mixing=mixing)
    plain = build(loss="contrastive")
    students, teachers = embeddings(1), embeddings(1, 2)
    loss, metrics = method.distill(students, teachers)
    assert loss > plain.distill(students, teachers)[0]
    assert metrics["train_mixed_similarity"].isfinite()
