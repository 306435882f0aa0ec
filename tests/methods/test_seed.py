"""SEED and the baselines in its frame, on given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.losses import NegativeEstimator, contrastive, info_nce_loss_func, seed_loss_func

MakeConfig = Callable[..., dict[str, Any]]
SIDE, DIM, ROWS = 16, 8, 6
SMALL = [{"crop_size": SIDE, "num_crops": 1}, {"crop_size": 8, "num_crops": 2}]
TWO = [{"crop_size": SIDE, "num_crops": 2}]


@pytest.fixture
def build(make_distilled: MakeConfig) -> Callable[..., Any]:
    """``build(augmentations=None, **method_kwargs)``."""

    def make(augmentations: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("loss", "seed") != "seed":
            kwargs["teacher_temperature"] = None
        changes = {} if augmentations is None else {"augmentations": augmentations}
        prepared = prepare(make_distilled("seed", method_kwargs=kwargs, **changes))
        torch.manual_seed(0)
        return prepared.method(prepared.cfg)

    return make


def embeddings(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(count)]


def test_is_the_loss_of_the_paper(build: Callable[..., Any]) -> None:
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


def test_two_large_crops_are_each_their_own_target(build: Callable[..., Any]) -> None:
    method = build(TWO)
    students, teachers = embeddings(2), embeddings(2, 2)
    loss, _ = method.distill(students, teachers)
    queue = method.queues[0].value
    each = [seed_loss_func(s, t, queue, 0.2, 0.05) for s, t in zip(students, teachers, strict=True)]
    torch.testing.assert_close(loss, torch.stack(each).mean())
    assert len(method._written) == 1
    torch.testing.assert_close(method._written[0], F.normalize(teachers[0], dim=1))


def test_small_patches_have_targets_and_a_queue_of_their_own(build: Callable[..., Any]) -> None:
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


def test_small_crops_that_learn_of_large_ones(build: Callable[..., Any]) -> None:
    method = build(SMALL, small_crop_target="large")
    assert method.num_targets == 1
    assert len(method.queues) == 1
    students, (teacher,) = embeddings(3), embeddings(1, 2)
    loss, _ = method.distill(students, [teacher])
    queue = method.queues[0].value
    each = [seed_loss_func(s, teacher, queue, 0.2, 0.05) for s in students]
    torch.testing.assert_close(loss, each[0] + torch.stack(each[1:]).mean())


def test_regression(build: Callable[..., Any]) -> None:
    method = build(loss="regression")
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    difference = F.normalize(student, dim=1) - F.normalize(teacher, dim=1)
    torch.testing.assert_close(loss, difference.square().sum(1).mean())
    assert not len(method.queues)


def test_contrastive_with_a_queue_is_info_nce(build: Callable[..., Any]) -> None:
    method = build(loss="contrastive", student_temperature=0.3)
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    expected = info_nce_loss_func(student, teacher, method.queues[0].value, 0.3)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("settings", [{}, {"tau_plus": 0.1}, {"tau_plus": 0.1, "beta": 1.0}])
def test_contrastive_within_the_batch(
    settings: dict[str, float], build: Callable[..., Any]
) -> None:
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


def test_mixed_negatives(build: Callable[..., Any]) -> None:
    mixing = {"num_hard": 5, "num_pair_mixes": 4, "num_query_mixes": 2, "warmup_epochs": 0}
    method = build(loss="contrastive", mixing=mixing)
    plain = build(loss="contrastive")
    students, teachers = embeddings(1), embeddings(1, 2)
    loss, metrics = method.distill(students, teachers)
    assert loss > plain.distill(students, teachers)[0]
    assert metrics["train_mixed_similarity"].isfinite()


def test_teacher_gets_no_gradient(build: Callable[..., Any]) -> None:
    for kwargs in ({}, {"loss": "contrastive"}, {"loss": "regression"}):
        method = build(**kwargs)
        student = embeddings(1)[0].requires_grad_()
        loss, _ = method.distill([student], embeddings(1, 2))
        (gradient,) = torch.autograd.grad(loss, [student])
        assert gradient.abs().max() > 0


def test_step_s_loss_runs_on_meta_tensors(build: Callable[..., Any], on_meta: Any) -> None:
    mixing = {"num_hard": 5, "num_pair_mixes": 4, "num_query_mixes": 2, "warmup_epochs": 0}
    for kwargs in (
        {},
        {"loss": "contrastive", "tau_plus": 0.1},
        {"loss": "contrastive", "negatives": "batch", "mixing": mixing},
        {"loss": "regression"},
    ):
        method = build(SMALL, **kwargs).to("meta")
        with on_meta:
            students = [torch.empty(ROWS, DIM, device="meta", requires_grad=True) for _ in range(3)]
            teachers = [torch.empty(ROWS, DIM, device="meta") for _ in range(3)]
            loss, _ = method.distill(students, teachers)
            loss.backward()


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"teacher_temperature": None}, "teacher_temperature"),
        ({"loss": "regression", "teacher_temperature": 0.01}, "teacher_temperature"),
        ({"tau_plus": 0.1}, "tau_plus"),
        ({"loss": "regression", "teacher_temperature": None, "beta": 1.0}, "beta"),
        ({"mixing": {"num_pair_mixes": 3}}, "mixing"),
        ({"teacher_temperature": 0.0}, "teacher_temperature"),
    ],
)
def test_refused(kwargs: dict[str, Any], key: str, make_distilled: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(make_distilled("seed", method_kwargs=kwargs))
    assert caught.value.key == f"method_kwargs.{key}"
