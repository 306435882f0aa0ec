"""ProtoSEED and ProtoCPC on given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.losses import protocpc_loss_func
from solo_ext.memory.prototypes import PrototypePrior, sinkhorn
from tests.methods.steps import embeddings

MakeConfig = Callable[..., dict[str, Any]]
Build = Callable[..., Any]
SIDE, DIM, PROTOTYPES = 16, 8, 20
SMALL = [{"crop_size": SIDE, "num_crops": 1}, {"crop_size": 8, "num_crops": 2}]
TWO_AND_SMALL = [{"crop_size": SIDE, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}]


def plain(
    student: Tensor, targets: Tensor, prototypes: Tensor, prior: Tensor, temperature: float = 0.1
) -> Tensor:
    return protocpc_loss_func(
        F.normalize(student, dim=1) @ prototypes.T, targets, prior, temperature
    )


def assigned(teacher: Tensor, prototypes: Tensor, kind: str = "sinkhorn") -> Tensor:
    scores = F.normalize(teacher, dim=1) @ prototypes.T
    return sinkhorn(scores, 0.04, 3) if kind == "sinkhorn" else (scores / 0.04).softmax(1)


def moved(probs: list[Tensor], momentum: float = 0.9) -> Tensor:
    return PrototypePrior(PROTOTYPES, momentum).peek(torch.cat(probs))


@pytest.mark.parametrize("assignment", ["sinkhorn", "softmax"])
@pytest.mark.parametrize("order", ["before_loss", "after_loss"])
@pytest.mark.parametrize("loss", ["protocpc", "ce"])
def test_is_the_loss_of_the_paper(
    assignment: str, order: str, loss: str, make_method: Build
) -> None:
    method = make_method("protoseed", assignment=assignment, prior_order=order, loss=loss)
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    found, metrics = method.distill([student], [teacher])
    table = method.prototypes.weight.detach()
    probs = assigned(teacher, table, assignment)
    after = moved([probs])
    used = after if (order, loss) == ("before_loss", "protocpc") else torch.ones(PROTOTYPES)
    torch.testing.assert_close(found, plain(student, probs, table, used))
    torch.testing.assert_close(metrics["train_align"] + metrics["train_unif"], found.detach())
    # Nothing is written before the step is done.
    assert torch.equal(method.prior.value, torch.ones(PROTOTYPES))
    method.on_train_batch_end(None, None, 0)
    torch.testing.assert_close(method.prior.value, after)
    torch.testing.assert_close(method.prior.value.sum(), torch.tensor(float(PROTOTYPES)))


def test_the_second_step_takes_the_first_one_s_prior(make_method: Build) -> None:
    method = make_method("protoseed", assignment="softmax", prior_order="after_loss")
    students, teachers = embeddings(2), embeddings(2, 2)
    method.distill(students[:1], teachers[:1])
    method.on_train_batch_end(None, None, 0)
    table = method.prototypes.weight.detach()
    first, second = (assigned(t, table, "softmax") for t in teachers)
    found, _ = method.distill(students[1:], teachers[1:])
    torch.testing.assert_close(found, plain(students[1], second, table, moved([first])))


def test_one_large_crop_is_the_target_of_all(make_method: Build) -> None:
    method = make_method("protoseed", SMALL)
    assert method.num_targets == 1
    students, (teacher,) = embeddings(3), embeddings(1, 2)
    found, _ = method.distill(students, [teacher])
    table = method.prototypes.weight.detach()
    probs = assigned(teacher, table)
    each = [plain(s, probs, table, moved([probs])) for s in students]
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_two_large_crops_are_each_their_own_target(make_method: Build) -> None:
    method = make_method("protoseed", TWO_AND_SMALL)
    students, teachers = embeddings(4), embeddings(2, 2)
    found, _ = method.distill(students, teachers)
    table = method.prototypes.weight.detach()
    probs = [assigned(t, table) for t in teachers]
    prior = moved(probs)
    each = [plain(s, p, table, prior) for s, p in zip(students[:2], probs, strict=True)]
    for student in students[2:]:
        each.append(torch.stack([plain(student, p, table, prior) for p in probs]).mean())
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_new_prototypes_learn_and_serve_the_teacher_uncopied(make_method: Build) -> None:
    method = make_method("protoseed")
    assert method.teacher.prototypes is None
    student = embeddings(1)[0].requires_grad_()
    (teacher,) = embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    to_student, to_table = torch.autograd.grad(loss, [student, method.prototypes.weight])
    table = method.prototypes.weight.detach().clone().requires_grad_()
    probs = assigned(teacher, table.detach())
    reference = plain(student, probs, table, moved([probs]))
    for found, expected in zip(
        (to_student, to_table), torch.autograd.grad(reference, [student, table]), strict=True
    ):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        method.prototypes.weight.mul_(torch.rand(PROTOTYPES, 1) + 0.5)
    method.on_train_batch_end(None, None, 0)
    torch.testing.assert_close(method.prototypes.weight.norm(dim=1), torch.ones(PROTOTYPES))


def test_old_prototypes_are_the_teacher_s(make_method: Build) -> None:
    """solo-learn's SwAV, of 8 prototypes; the student's own start there and move away."""
    method = make_method("protoseed", prototypes="old", num_prototypes=8)
    table = method.teacher.prototypes
    torch.testing.assert_close(table.norm(dim=1), torch.ones(8))
    torch.testing.assert_close(method.prototypes.weight, table)
    with torch.no_grad():
        method.prototypes.weight.copy_(F.normalize(torch.randn(8, DIM), dim=1))
    (student,), (teacher,) = embeddings(1), embeddings(1, 2)
    loss, _ = method.distill([student], [teacher])
    probs = assigned(teacher, table)
    prior = PrototypePrior(8, 0.9).peek(probs)
    torch.testing.assert_close(loss, plain(student, probs, method.prototypes.weight, prior))
    assert "teacher.prototypes" not in method.state_dict()
    assert not method.teacher.prototypes.requires_grad


def test_old_prototypes_of_a_teacher_without(
    make_config: MakeConfig, make_method: Build, tmp_path: Path
) -> None:
    run = tmp_path / "simclr"
    pretrain(prepare(make_config("simclr")), run_dir=run, show_progress=False)
    with pytest.raises(ConfigError, match="no prototypes"):
        make_method("protoseed", prototypes="old", num_prototypes=8, teacher={"path": str(run)})


def test_ssl_compares_each_crop_with_the_other_large_ones(make_method: Build) -> None:
    method = make_method("protocpc", TWO_AND_SMALL)
    students, teachers = embeddings(4), embeddings(2, 2)
    found, _ = method.compare(students, teachers)
    table = method.prototypes.weight.detach()
    probs = [assigned(t, table) for t in teachers]
    prior = moved(probs)
    each = [
        plain(s, p, table, prior)
        for v, s in enumerate(students)
        for u, p in enumerate(probs)
        if u != v
    ]
    assert len(each) == 6
    torch.testing.assert_close(found, torch.stack(each).mean())


@pytest.mark.parametrize(("frozen", "moves"), [(1, False), (0, True)])
def test_ssl_prototypes_are_frozen_at_first(
    frozen: int, moves: bool, make_config: MakeConfig, tmp_path: Path
) -> None:
    kwargs = {"freeze_prototypes_epochs": frozen}
    prepared = prepare(make_config("protocpc", method_kwargs=kwargs))
    torch.manual_seed(5)
    held: list[Tensor] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Any, method: Any) -> None:
            held.append(method.prototypes.weight.detach().clone())

        def on_train_end(self, trainer: Any, method: Any) -> None:
            held.append(method.prototypes.weight.detach().clone())

    pretrain(prepared, run_dir=tmp_path / "run", callbacks=[Watch()], show_progress=False)
    moved_by = (held[0] - held[1]).abs().max()
    assert bool(moved_by > 1e-4) is moves
