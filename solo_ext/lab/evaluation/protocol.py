"""What a protocol of ``solo-ext eval`` is: its settings, how they are read, how it is run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from solo_ext.config.check import validated
from solo_ext.core.errors import ConfigError, suggest_name
from solo_ext.core.types import Section
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import Features

Row = dict[str, Any]
"""Numbers and short texts by name. ``picture``: file name of a PNG in the context's ``out`` that
the report embeds; ``saved``: file name of weights; ``files``: paths of further files there."""

WITHOUT_LABELS = ("geometry", "map", "neighbors", "views", "clusters", "transfer")
"""Names of the protocols that need no labels, or none of the run's images, for messages."""
NotHigher = Mapping[str, Literal["lower", "neither"]]
"""Which value of a number is better, for those of which it is not the higher one."""


class Protocol(Section):
    """Settings of a protocol, and how it measures a backbone on a data set.

    >>> class Parameters(Protocol):
    ...     title = "Size"
    ...     def run(self, context):
    ...         return [{"parameters": sum(p.numel() for p in context.backbone().parameters())}]
    >>> Parameters.headline([{"acc1": 87.5, "parameters": 1000}])
    {'acc1': 87.5}
    """

    title: ClassVar[str]
    """Name of the protocol in tables."""
    needs_labels: ClassVar[bool] = True
    """Whether it measures only images with labels."""
    not_higher: ClassVar[NotHigher] = {}
    """Those numbers of the headline of which the highest is not the best."""
    by_default: ClassVar[bool] = True
    """Whether ``solo-ext eval suite`` runs the protocol if none are named."""

    def depends_on(self, context: EvalContext) -> list[str | None]:
        """Digests of images measured besides the context's; ``None`` for an unknown digest."""
        return []

    def unfit(self, context: EvalContext) -> ConfigError | None:
        """Why these images or this backbone do not allow the protocol; ``None`` if they do.

        A suite leaves the protocol out then, which is no failure of it.
        """
        if context.unlabelled is None or not self.needs_labels:
            return None
        reason, others = context.unlabelled, ", ".join(WITHOUT_LABELS)
        remedy = f"{reason.remedy}, or take a protocol that needs no labels: {others}"
        return ConfigError(reason.key, reason.value, reason.problem, remedy)

    @abstractmethod
    def run(self, context: EvalContext) -> list[Row]:
        """Measures; raises ``UserError`` for settings, images or a backbone that do not fit."""

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The few numbers by which runs are compared, such as ``{"acc1": 87.5}``."""
        return {"acc1": float(rows[0]["acc1"])}


class FeatureProtocol(Protocol):
    """A protocol on frozen features, which are extracted once for all of them.

    >>> class Length(FeatureProtocol):
    ...     title = "Mean length"
    ...     def measure(self, features):
    ...         return [{"length": features.test[0].norm(dim=1).mean().item()}]
    >>> rows = torch.ones(2, 4), torch.tensor([0, 1])
    >>> Length().measure(Features(rows, rows, ["cat", "dog"]))
    [{'length': 2.0}]
    """

    @abstractmethod
    def measure(self, features: Features) -> list[Row]:
        """Measures features; raises ``UserError`` for settings that do not fit them."""

    def run(self, context: EvalContext) -> list[Row]:
        return self.measure(context.features.to(context.device))


def measure(protocol: Protocol, context: EvalContext) -> list[Row]:
    """Runs one protocol; if there are several processes, only the first gets rows.

    Raises:
        UserError: settings, images or a backbone that the protocol does not allow.

    >>> from types import SimpleNamespace
    >>> from solo_ext.lab.evaluation.features import ALONE
    >>> from solo_ext.lab.evaluation.scores import KNN
    >>> rows = torch.eye(4), torch.arange(4)
    >>> features = Features(rows, rows, list("abcd"))
    >>> context = SimpleNamespace(features=features, device="cpu", ranks=ALONE, unlabelled=None)
    >>> measure(KNN(k=[1], temperature=[0.1]), context)
    [{'k': 1, 'temperature': 0.1, 'acc1': 100.0, 'acc5': 100.0}]
    """
    if (reason := protocol.unfit(context)) is not None:
        raise reason
    if not context.ranks.rank:
        return protocol.run(context)
    if isinstance(protocol, FeatureProtocol):
        _ = context.features.train, context.features.test
    return []


def protocols_of(
    kinds: Mapping[str, type[Protocol]],
    names: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]],
    prefix: str,
) -> dict[str, Protocol]:
    """Builds the named protocols with their ``settings``, which a config has under ``prefix``.

    Raises:
        ConfigError: an unknown protocol, a wrong setting, or settings of an unnamed protocol.

    >>> from solo_ext.lab.evaluation.scores import KNN
    >>> protocols_of({"knn": KNN}, ["knn"], {"knn": {"k": [5]}}, "online_eval.settings")
    {'knn': KNN(k=[5], temperature=[0.07, 0.1])}
    """
    for name in names:
        if name not in kinds:
            raise ConfigError("protocols", name, "not possible here", suggest_name(name, kinds))
    for name in settings:
        if name not in names:
            problem = "not among the protocols"
            raise ConfigError(
                f"{prefix}.{name}", settings[name], problem, suggest_name(name, names)
            )
    return {
        name: validated(kinds[name], settings.get(name, {}), prefix=f"{prefix}.{name}")
        for name in dict.fromkeys(names)
    }


def files_of(rows: Iterable[Row]) -> list[str]:
    """Paths of the rows' pictures, weights and further files, relative to the context's ``out``.

    >>> files_of([{"acc1": 87.5, "picture": "map.png"}, {"picture": "map.png", "files": ["a.png"]}])
    ['map.png', 'a.png']
    """
    named = [[row.get("picture"), row.get("saved"), *(row.get("files") or ())] for row in rows]
    return list(dict.fromkeys(str(file) for files in named for file in files if file))


def accuracies(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Percentages of rows whose class is the first guess of logits (n, C), and of the first five.

    A target of -1 is never guessed, and a row without finite logits is wrong.

    >>> accuracies(torch.eye(8), torch.arange(8))
    {'acc1': 100.0, 'acc5': 100.0}
    """
    # topk would rank NaN first.
    logits = logits.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    guess = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    hit = (guess == targets[:, None]) & logits.isfinite().any(-1, keepdim=True)
    first, five = torch.stack((hit[:, 0], hit.any(-1)), dim=1).sum(0).tolist()
    return {"acc1": 100.0 * first / len(targets), "acc5": 100.0 * five / len(targets)}
