"""One loop of training for each method: forward, loss, SGD, and what follows a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.methods.fifty_steps import formulas, networks
from tests.methods.fifty_steps.networks import State

Constants = dict[str, float]
TRAINING: Constants = {
    # 3.2 and 1.6 times batch / 256.
    "lr": 0.1,
    "classifier_lr": 0.05,
    "sgd_momentum": 0.9,
    "weight_decay": 1e-3,
    "base_tau": 0.99,
    "final_tau": 1.0,
}


class Loop:
    """What all methods do; the others say what their loss is and what follows a step.

    Args:
        start: weights and tables that training starts from.
        views: of the images of the batch, large ones first.
        labels: of these images.
        constants: of the method and of ``TRAINING``.
        heads: layers of each network.
        given: whatever else a method needs, such as draws.
    """

    learns: ClassVar[Sequence[str]] = ("backbone", "projector")
    follows: ClassVar[Sequence[str]] = ()
    """Networks with a momentum network beside them."""
    classified: ClassVar[slice] = slice(None)
    """Large views that the classifier learns from."""

    def __init__(
        self,
        start: State,
        views: Sequence[Tensor],
        labels: Tensor,
        constants: Constants,
        heads: dict[str, list[str]],
        given: dict[str, Any],
    ) -> None:
        self.w = {k: v.clone() for k, v in start.items()}
        self.views, self.labels, self.given = views, labels, given
        self.constants, self.heads = {**TRAINING, **constants}, heads
        self.velocity: State = {}
        self.step = 0
        self.large: int = given["large"]
        self.steps: int = given["steps"]
        self.steps_per_epoch: int = given["steps_per_epoch"]
        self.features: list[Tensor] = []
        self.tau = self.constants["base_tau"]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every crop with every other large crop."""
        crops, large = range(len(self.views)), range(self.large)
        return [(own, other) for other in large for own in crops if own != other]

    @property
    def epoch(self) -> int:
        """Counted from 0."""
        return self.step // self.steps_per_epoch

    def run(self, steps: int) -> list[float]:
        """The loss of each step."""
        return [self._one_step() for _ in range(steps)]

    def _one_step(self) -> float:
        constants, learnt = self.constants, networks.weights_of(self.w, self.learns)
        classifier = networks.weights_of(self.w, ["classifier"])
        for name in (*learnt, *classifier):
            self.w[name] = self.w[name].detach().requires_grad_()
        self.features = []
        loss = self.loss() + self._classifier_s_loss()
        found = torch.autograd.grad(loss, [self.w[name] for name in (*learnt, *classifier)])
        gradients = dict(zip((*learnt, *classifier), found, strict=True))
        with torch.no_grad():
            self.w = {k: v.detach() for k, v in self.w.items()}
            self.mend(gradients)
            for names, lr, decay in (
                (learnt, constants["lr"], constants["weight_decay"]),
                # solo-learn lets no weight of the classifier decay.
                (classifier, constants["classifier_lr"], 0.0),
            ):
                own = {name: gradients[name] for name in names if name in gradients}
                momentum = constants["sgd_momentum"]
                networks.sgd_step(self.w, self.velocity, own, lr, momentum, decay)
            networks.follow(self.w, self.follows, self.tau)
            self.step += 1
            self.tau = networks.tau_after(
                self.step, self.steps, constants["base_tau"], constants["final_tau"]
            )
            self.after()
        return float(loss.detach())

    def _classifier_s_loss(self) -> Tensor:
        """Of features that it cannot change."""
        losses = []
        for features in self.features[: self.large][self.classified]:
            w = self.w
            logits = features.detach() @ w["classifier.weight"].T + w["classifier.bias"]
            losses.append(formulas.cross_entropy(logits, self.labels))
        return formulas.mean(losses)

    def embed(self, view: Tensor) -> Tensor:
        """``z = g(f(x))``."""
        self.features.append(self.through("backbone", view))
        return self.through("projector", self.features[-1])

    def through(self, name: str, x: Tensor, train: bool = True) -> Tensor:
        """A network, or the momentum network of one."""
        layers = self.heads[name.removeprefix("momentum_")]
        return networks.forward(self.w, name, layers, x, train)

    @torch.no_grad()
    def key(self, view: Tensor, train: bool = True) -> Tensor:
        """The momentum networks' embedding."""
        features = self.through("momentum_backbone", view, train)
        return self.through("momentum_projector", features, train)

    def loss(self) -> Tensor:
        """The method's own."""
        raise NotImplementedError

    def mend(self, gradients: State) -> None:
        """Before the optimiser's step."""

    def after(self) -> None:
        """After the optimiser's step and the momentum networks'."""


class Batch(Loop):
    """Debiased and hard negatives."""

    def loss(self) -> Tensor:
        c = self.constants
        z = [self.embed(view) for view in self.views]
        return formulas.against_the_batch(z, c["temperature"], c["tau_plus"], c["beta"])


class Queues(Loop):
    """A crop meets another large one's key and the queue of that one's past keys."""

    follows = ("backbone", "projector")

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        self.keys = [formulas.units(self.key(view)) for view in self.views[: self.large]]
        if self.step == 0:
            self.places = [0, 0]
        losses = []
        for key in range(self.large):
            queries = [z[own] for own, other in self.pairs if other == key]
            keys, queue = self.keys[key] * len(queries), self.w[f"queues.{key}.value"]
            draws = self.given["draws"]
            # Mixtures are drawn for the first queue before those for the second.
            drawn = draws[self.large * self.step + key] if draws else None
            losses.append(
                formulas.against_a_queue(torch.cat(queries), keys, queue, self.constants, drawn)
            )
        return formulas.mean(losses)

    def after(self) -> None:
        for number, keys in enumerate(self.keys):
            name, place = f"queues.{number}.value", self.places[number]
            self.w[name], self.places[number] = networks.written(self.w[name], place, keys)


class Neighbours(Loop):
    """NNCLR with both terms."""

    learns = ("backbone", "projector", "predictor")

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        q = [self.through("predictor", x) for x in z]
        support = self.w["support_set.value"]
        if self.step == 0:
            self.place = 0
        self.first = formulas.units(z[0].detach())
        losses = []
        for other, own in self.pairs:
            found = [formulas.nearest(row, support) for row in z[own].detach()]
            losses.append(formulas.rows_and_columns(found, q[other], self.constants["temperature"]))
        return formulas.mean(losses)

    def after(self) -> None:
        name = "support_set.value"
        self.w[name], self.place = networks.written(self.w[name], self.place, self.first)


class Clusters(Loop):
    """PCL: the first view is the query, the second the key."""

    follows = ("backbone", "projector")
    classified = slice(1)

    def loss(self) -> Tensor:
        c = self.constants
        if self.step == 0:
            self.place = 0
        # Before the keys of this step, with which the running statistics of batch norm move.
        if self.epoch >= c["warmup_epochs"] and self.step % self.steps_per_epoch == 0:
            self.clusterings = self._e_step()
        z = self.embed(self.views[0])
        self.keys = formulas.units(self.key(self.views[1]))
        info = formulas.against_a_queue(z, self.keys, self.w["queues.0.value"], c)
        if self.epoch < c["warmup_epochs"]:
            return info
        terms = []
        for m, (prototypes, phi, own) in enumerate(self.clusterings):
            mine = [own[i] for i in self.given["indices"]]
            drawn = self.given.get("drawn")
            others = drawn[self.step][m] if drawn else None
            terms.append(formulas.proto_nce(z, prototypes, phi, mine, others))
        return info + c["proto_weight"] * formulas.mean(terms)

    def _e_step(self) -> list[tuple[list[Tensor], list[float], list[int]]]:
        c, found = self.constants, []
        features = formulas.units(self.key(self.given["images"], train=False))
        for m, count in enumerate(self.given["num_prototypes"]):
            known = self.given.get("assignments")
            own = known[self.epoch][m] if known else formulas.kmeans(features, count)
            means = formulas.means_of(features, own, count)
            assert formulas.nearest_of(features, means) == own
            phi = formulas.concentrations(features, means, own, c["temperature"], c["alpha"])
            found.append(([formulas.unit(x) for x in means], phi, own))
        return found

    def after(self) -> None:
        name = "queues.0.value"
        self.w[name], self.place = networks.written(self.w[name], self.place, self.keys)


class SEED(Loop):
    """Each crop is its own target; small ones have a queue of their own."""

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        if self.step == 0:
            self.place = 0
        self.keys = [formulas.units(teacher) for teacher in self.given["teachers"]]
        own = list(zip(z, self.keys, strict=True))[: self.large]
        loss = formulas.mean([self.term(x, keys, 0) for x, keys in own])
        if len(z) == self.large:
            return loss
        return loss + self.constants["small_weight"] * self.small(z)

    def small(self, z: Sequence[Tensor]) -> Tensor:
        """The mean over small crops."""
        own = list(zip(z, self.keys, strict=True))[self.large :]
        return formulas.mean([self.term(x, keys, 1) for x, keys in own])

    def term(self, z: Tensor, keys: formulas.Rows, queue: int) -> Tensor:
        """Of a crop, and the teacher's embedding of one."""
        c, rows = self.constants, self.w[f"queues.{queue}.value"]
        return formulas.seed(z, keys, rows, c["student_temperature"], c["teacher_temperature"])

    def after(self) -> None:
        place = self.place
        # Of the first large crop, and of the first small one.
        for queue, view in enumerate((0, self.large)):
            name = f"queues.{queue}.value"
            if name in self.w:
                self.w[name], self.place = networks.written(self.w[name], place, self.keys[view])


class SEEDOfLarge(SEED):
    """Each large crop is its own target, and one of every small crop."""

    def small(self, z: Sequence[Tensor]) -> Tensor:
        large = self.keys[: self.large]
        return formulas.mean([self.term(x, keys, 0) for x in z[self.large :] for keys in large])


class Prototypes(Loop):
    """What ProtoSEED and ProtoCPC share."""

    learns = ("backbone", "projector", "prototypes")

    def loss(self) -> Tensor:
        c, table = self.constants, self.w["prototypes.weight"]
        z = [self.embed(view) for view in self.views]
        assigned = [self._assigned(teacher, table.detach()) for teacher in self.teachers()]
        everyone = torch.cat(assigned)
        now = table.shape[0] * everyone.sum(0) / len(everyone)
        share = c["prior_momentum"]
        self.prior = share * self.w["prior.value"] + (1 - share) * now
        tau = c["student_temperature"]
        losses = [
            weight * formulas.protocpc(z[student], assigned[teacher], table, self.prior, tau)
            for student, teacher, weight in self.targets()
        ]
        return torch.stack(losses).sum() / sum(weight for _, _, weight in self.targets())

    def _assigned(self, teacher: Tensor, table: Tensor) -> Tensor:
        return self.assign(torch.stack([table @ z for z in formulas.units(teacher)]))

    def assign(self, scores: Tensor) -> Tensor:
        """Sinkhorn's assignments."""
        c = self.constants
        return formulas.sinkhorn(scores, c["teacher_temperature"], int(c["iterations"]))

    def teachers(self) -> Sequence[Tensor]:
        """The teacher's embedding of each large view."""
        raise NotImplementedError

    def targets(self) -> Sequence[tuple[int, int, float]]:
        """Views, each with a large one whose assignment it predicts, and a weight."""
        raise NotImplementedError

    def after(self) -> None:
        rows = formulas.units(self.w["prototypes.weight"])
        self.w["prototypes.weight"], self.w["prior.value"] = torch.stack(rows), self.prior


class ProtoSEED(Prototypes):
    """Each large crop is its own target, and one of every small crop; the teacher is frozen."""

    def teachers(self) -> Sequence[Tensor]:
        teachers: list[Tensor] = self.given["teachers"]
        return teachers[: self.large]

    def targets(self) -> Sequence[tuple[int, int, float]]:
        large, small = range(self.large), range(self.large, len(self.views))
        shared = [(own, other, 1 / self.large) for own in small for other in large]
        return [(view, view, 1.0) for view in large] + shared


class ProtoCPC(Prototypes):
    """Each large crop is a target of every other crop; the teacher is a moving average."""

    follows = ("backbone", "projector")

    def teachers(self) -> Sequence[Tensor]:
        return [self.key(view) for view in self.views[: self.large]]

    def targets(self) -> Sequence[tuple[int, int, float]]:
        return [(own, other, 1.0) for own, other in self.pairs]

    def mend(self, gradients: State) -> None:
        if self.epoch < self.constants["freeze_prototypes_epochs"]:
            del gradients["prototypes.weight"]


class SoftmaxProtoSEED(ProtoSEED):
    """Assigns by softmax, with which the prior is not flat."""

    def assign(self, scores: Tensor) -> Tensor:
        return torch.stack(
            [formulas.softmax(row / self.constants["teacher_temperature"]) for row in scores]
        )


class SoftNearestNeighbor(Loop):
    """Of all crops of the batch, an image's crops being of one class."""

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        return formulas.soft_nearest_neighbor(z, self.constants["temperature"])


class Triplets(Loop):
    """With semi-hard negatives."""

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        return formulas.semi_hard_triplets(z, self.pairs, self.constants["margin"])


class ArcFace(Loop):
    """Of labels, whose directions are learnt."""

    learns = ("backbone", "projector", "criterion")

    def loss(self) -> Tensor:
        c = self.constants
        z = [self.embed(view) for view in self.views]
        weights = self.w["criterion.class_weights.weight"]
        return formulas.arcface(z, self.labels, weights, c["scale"], c["margin"])


class Alignment(Loop):
    """Wang and Isola's loss."""

    def loss(self) -> Tensor:
        z = [self.embed(view) for view in self.views]
        # Of each crop by itself, as Wang and Isola have it: no image is compared with itself.
        spread = formulas.mean([formulas.uniformity(formulas.units(view)) for view in z])
        return formulas.alignment(z, self.pairs) + self.constants["uniformity_weight"] * spread
