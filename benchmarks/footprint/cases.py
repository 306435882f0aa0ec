"""The shipped configs of ImageNet's sizes, on two machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.footprint import formulas
from benchmarks.footprint.formulas import Footprint, Sizes, perceptron

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "solo_ext"
RESNET50, RESNET18 = (2048, 23_508_032, 212_904), (512, 11_176_512, 38_560)
"""Width, parameters, and bytes of batch norm's buffers."""
CLASSES = 1000


class Machines(NamedTuple):
    """Where a run is, and how much it reads.

    Attributes:
        name: of the column.
        images: n.
        processes: R.
        batch: N, of a process.
    """

    name: str
    images: int
    processes: int
    batch: int


IMAGENET = Machines("ImageNet-1k, 8 GPUs", 1_281_167, 8, 32)
BILLION = Machines("10^9 images, 128 GPUs", 1_000_000_000, 128, 32)


@dataclass(frozen=True)
class Case:
    """A method as a config has it.

    Attributes:
        method: name.
        config: shipped config.
        dim: D.
        backbone: width, parameters and bytes of batch norm.
        heads: parameters and bytes of batch norm of all heads that learn.
        learned: further parameters that learn: prototypes, weights of classes.
        footprint: by sizes.
        momentum: whether a momentum copy of backbone and projector has batch norm of its own.
        views: crops that are embedded.
    """

    method: str
    config: str
    dim: int
    backbone: tuple[int, int, int]
    heads: list[tuple[int, int]]
    learned: int
    footprint: Callable[[Sizes], Footprint]
    momentum: bool = False
    views: int = 2

    def sizes(self, on: Machines) -> Sizes:
        """Those of the method on some machines."""
        return Sizes(on.images, on.batch, on.processes, self.dim, self.views)

    @property
    def parameters(self) -> int:
        """P, with the online classifier."""
        width, backbone, _ = self.backbone
        classifier = width * CLASSES + CLASSES
        return backbone + classifier + sum(p for p, _ in self.heads) + self.learned

    @property
    def batch_norm(self) -> int:
        """Bytes that DDP broadcasts before a forward pass."""
        copied = self.backbone[2] + self.heads[0][1]
        others = sum(b for _, b in self.heads[1:])
        return copied * (2 if self.momentum else 1) + others


def cases() -> list[Case]:
    """Every method once; those without a config of ImageNet by that of ImageNet-100."""
    return [*_in_batch(), _mochi(), _neighbours(), _metric(), _pcl(), _protocpc(), *_distilled()]


def kwargs_of(config: str) -> dict[str, Any]:
    """``method_kwargs`` as the file has them."""
    text = (CONFIGS / f"{config}.yaml").read_text()
    return dict(yaml.safe_load(text)["method_kwargs"])


def _in_batch() -> list[Case]:
    found = []
    for method in ("debiased", "hard_negative"):
        kwargs = kwargs_of(f"imagenet100/{method}")
        dim = kwargs["proj_output_dim"]
        head = perceptron(RESNET50[0], kwargs["proj_hidden_dim"], dim)
        config = f"imagenet100/{method}"
        found.append(Case(method, config, dim, RESNET50, [head], 0, formulas.in_batch))
    return found


def _mochi() -> Case:
    kwargs = kwargs_of("imagenet/mochi")
    dim, queue = kwargs["proj_output_dim"], kwargs["queue_size"]
    mixes = kwargs["mixing"]["num_pair_mixes"]
    head = perceptron(RESNET50[0], kwargs["proj_hidden_dim"], dim, batch_norm=False)

    def footprint(s: Sizes) -> Footprint:
        return formulas.mochi(s, queue, mixes)

    return Case("mochi", "imagenet/mochi", dim, RESNET50, [head], 0, footprint, momentum=True)


def _neighbours() -> Case:
    kwargs = kwargs_of("imagenet/nnclr_symmetric")
    dim, hidden = kwargs["proj_output_dim"], kwargs["proj_hidden_dim"]
    support = kwargs["support_set"]
    widths = RESNET50[0], *[hidden] * (kwargs["proj_layers"] - 1), dim
    heads = [
        perceptron(*widths, last_batch_norm=True),
        perceptron(dim, kwargs["pred_hidden_dim"], dim),
    ]

    def footprint(s: Sizes) -> Footprint:
        return formulas.nearest_neighbours(s, support["size"], support["top_k"])

    config = "imagenet/nnclr_symmetric"
    return Case("nnclr_symmetric", config, dim, RESNET50, heads, 0, footprint)


def _metric() -> Case:
    kwargs = kwargs_of("imagenet100/metric")
    dim, counts = kwargs["proj_output_dim"], kwargs["clusters"]["num_prototypes"]
    head = perceptron(RESNET50[0], kwargs["proj_hidden_dim"], dim)

    def footprint(s: Sizes) -> Footprint:
        return formulas.metric(s, counts)

    learned = counts[0] * dim
    return Case("metric", "imagenet100/metric", dim, RESNET50, [head], learned, footprint)


def _pcl() -> Case:
    kwargs = kwargs_of("imagenet/pcl")
    dim, width = kwargs["proj_output_dim"], RESNET50[0]
    head = perceptron(width, width, dim, batch_norm=False)

    def footprint(s: Sizes) -> Footprint:
        return formulas.pcl(s, kwargs["queue_size"], kwargs["num_prototypes"])

    return Case("pcl", "imagenet/pcl", dim, RESNET50, [head], 0, footprint, momentum=True)


def _protocpc() -> Case:
    kwargs = kwargs_of("imagenet/protocpc")
    dim, hidden, count = (
        kwargs[k] for k in ("proj_output_dim", "proj_hidden_dim", "num_prototypes")
    )
    head = perceptron(RESNET50[0], hidden, hidden, dim)

    def footprint(s: Sizes) -> Footprint:
        return formulas.assignments(s, count, targets=2)

    return Case(
        "protocpc", "imagenet/protocpc", dim, RESNET50, [head], count * dim, footprint, True
    )


def _distilled() -> list[Case]:
    dim, width = 128, RESNET18[0]
    queue = kwargs_of("imagenet/seed_moco_v2")["queue_size"]
    count = kwargs_of("imagenet/protoseed_moco_v2")["num_prototypes"]

    def of_seed(s: Sizes) -> Footprint:
        return formulas.seed(s, queue)

    def of_protoseed(s: Sizes) -> Footprint:
        return formulas.assignments(s, count, targets=1)

    own = [perceptron(width, width, dim, batch_norm=False)]
    like_the_teacher = [perceptron(width, RESNET50[0], dim, batch_norm=False)]
    seed, protoseed = "imagenet/seed_moco_v2", "imagenet/protoseed_moco_v2"
    return [
        Case("seed", seed, dim, RESNET18, own, 0, of_seed, views=1),
        Case(
            "protoseed",
            protoseed,
            dim,
            RESNET18,
            like_the_teacher,
            count * dim,
            of_protoseed,
            views=1,
        ),
    ]


TEACHER = RESNET50[1] + perceptron(RESNET50[0], RESNET50[0], 128, batch_norm=False)[0]
"""Parameters of MoCo v2's ResNet-50 with its head."""
