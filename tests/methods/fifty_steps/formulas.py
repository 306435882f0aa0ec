"""Losses of embeddings by their formulas, one sample after the other.

They are written from the pages in ``docs/methods`` and the papers, and from nothing of the package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rows = Sequence[Tensor]
Pairs = Sequence[tuple[int, int]]
"""Numbers of views: of the anchor, and of what it is compared with."""


def unit(x: Tensor) -> Tensor:
    """A vector of length 1."""
    return x / (x * x).sum().sqrt()


def units(x: Tensor) -> list[Tensor]:
    """The rows of a matrix, each of length 1."""
    return [unit(row) for row in x]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Of two vectors."""
    return (a * b).sum()


def dots(x: Tensor, rows: Rows) -> Tensor:
    """Of a vector with each row."""
    return torch.stack(list(rows)) @ x


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Of two vectors."""
    return ((a - b) ** 2).sum()


def mean(values: Sequence[Tensor]) -> Tensor:
    """Of scalars."""
    return torch.stack(list(values)).sum() / len(values)


def softmax(x: Tensor) -> Tensor:
    """Of one row."""
    powers = torch.exp(x)
    return powers / powers.sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the rows."""
    return mean([-torch.log(softmax(row)[t]) for row, t in zip(logits, targets, strict=True)])


# docs/methods/debiased.md, hard_negative.md, mochi.md.


def weighted_mean(s: Tensor, beta: float) -> Tensor:
    """Of e^s, by weights of e^(beta s)."""
    return torch.exp((1 + beta) * s).sum() / torch.exp(beta * s).sum()


def against(s_p: Tensor, s_k: Tensor, temperature: float, tau: float, beta: float) -> Tensor:
    """Losses of an anchor with each positive: Eq. 4 of hard negatives; beta 0: 7, 8 of debiased."""
    g = (weighted_mean(s_k, beta) - tau * weighted_mean(s_p, beta)) / (1 - tau)
    mass = len(s_k) * torch.clamp(g, min=math.exp(-1 / temperature))
    return -torch.log(torch.exp(s_p) / (torch.exp(s_p) + mass))


def against_the_batch(
    views: Sequence[Tensor], temperature: float, tau: float, beta: float
) -> Tensor:
    """Every crop with the other crops of its image; negatives: all crops of the other images."""
    rows, losses = [units(view) for view in views], list[Tensor]()
    for image in range(len(rows[0])):
        negatives = [n for view in rows for j, n in enumerate(view) if j != image]
        for own, view in enumerate(rows):
            s_p = dots(view[image], [x[image] for other, x in enumerate(rows) if other != own])
            s_k = dots(view[image], negatives)
            losses += against(s_p / temperature, s_k / temperature, temperature, tau, beta)
    return mean(losses)


def mixtures(query: Tensor, queue: Tensor, draws: Any, i: int) -> list[Tensor]:
    """Eq. 4 and 5 of MoCHi for query i, by drawn ranks among its hardest negatives."""
    hard = sorted(queue, key=lambda row: -float(dot(query.detach(), row)))
    found = []
    for (a, b), alpha in zip(draws.pair_indices[i], draws.alpha[i], strict=True):
        found.append(unit(alpha * hard[a] + (1 - alpha) * hard[b]))
    for a, beta in zip(draws.single_indices[i], draws.beta[i], strict=True):
        found.append(unit(beta * query.detach() + (1 - beta) * hard[a]))
    return found


def against_a_queue(
    queries: Tensor, keys: Rows, queue: Tensor, constants: dict[str, float], draws: Any = None
) -> Tensor:
    """Each query with its key; negatives: the queue, and mixtures of it where there are draws."""
    temperature, losses = constants["temperature"], list[Tensor]()
    tau, beta = constants.get("tau_plus", 0.0), constants.get("beta", 0.0)
    for i, (query, key) in enumerate(zip(units(queries), keys, strict=True)):
        negatives = list(queue)
        if draws is not None:
            negatives += mixtures(query, queue, draws, i)
        s_p, s_k = (dots(query, rows) / temperature for rows in ([key], negatives))
        losses += against(s_p, s_k, temperature, tau, beta)
    return mean(losses)


# docs/methods/nnclr_symmetric.md.


def nearest(z: Tensor, support: Tensor) -> Tensor:
    """The row of the support set that is most similar."""
    return support[dots(unit(z), list(support)).argmax()]


def rows_and_columns(neighbours: Rows, predictions: Tensor, temperature: float) -> Tensor:
    """Half the sum of the loss over rows and of that over columns."""
    q, n = units(predictions), len(neighbours)
    e = torch.stack([torch.exp(dots(row, q) / temperature) for row in neighbours])
    rows = [-torch.log(e[i, i] / e[i].sum()) for i in range(n)]
    columns = [-torch.log(e[i, i] / e[:, i].sum()) for i in range(n)]
    return (mean(rows) + mean(columns)) / 2


# docs/methods/pcl.md.


def proto_nce(
    queries: Tensor, prototypes: Rows, phi: Sequence[float], own: Sequence[int], others: Any = None
) -> Tensor:
    """The second term of Eq. 11 for one clustering; others: what was drawn, else all prototypes.

    Of drawn ones, the prototypes of the batch come first, those of two images in one cluster twice.
    """
    losses = []
    for i, query in enumerate(units(queries)):
        s = torch.exp(dots(query, prototypes) / torch.tensor(phi, dtype=query.dtype))
        columns = list(range(len(s))) if others is None else [*own, *others]
        losses.append(-torch.log(s[own[i]] / s[columns].sum()))
    return mean(losses)


def concentrations(
    features: Rows, means: Rows, own: Sequence[int], temperature: float, alpha: float
) -> list[float]:
    """phi of every cluster: Eq. 12, and what the page says of small ones and of percentiles."""
    raw: list[float | None] = []
    for cluster, middle in enumerate(means):
        apart = [
            math.sqrt(float(squared_distance(x, middle)))
            for x, c in zip(features, own, strict=True)
            if c == cluster
        ]
        n = len(apart)
        raw.append(sum(apart) / n / math.log(n + alpha) if n > 1 else None)
    largest = max(value for value in raw if value is not None)
    full = [largest if value is None else value for value in raw]
    low, high = (_percentile(full, share) for share in (0.1, 0.9))
    clipped = [min(max(value, low), high) for value in full]
    scale = temperature / (sum(clipped) / len(clipped))
    return [max(value * scale, temperature / 100) for value in clipped]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def kmeans(features: Rows, count: int) -> list[int]:
    """The clustering of the lowest objective that Lloyd's iterations find from any start."""
    best, lowest = list[int](), math.inf
    for start in itertools.combinations(features, count):
        means, own = list(start), list[int]()
        while True:
            now = nearest_of(features, means)
            if now == own or len(set(now)) < count:
                break
            own, means = now, means_of(features, now, count)
        pairs = zip(features, now, strict=True)
        objective = sum(float(squared_distance(x, means[c])) for x, c in pairs)
        if objective < lowest and len(set(now)) == count:
            best, lowest = now, objective
    return best


def nearest_of(features: Rows, means: Rows) -> list[int]:
    """The mean that is nearest to each feature, by number."""
    x, middles = torch.stack(list(features)), torch.stack(list(means))
    return ((x.unsqueeze(1) - middles) ** 2).sum(2).argmin(1).tolist()


def means_of(features: Rows, own: Sequence[int], count: int) -> list[Tensor]:
    """The means of the clusters, which all have members."""
    members = [[x for x, c in zip(features, own, strict=True) if c == k] for k in range(count)]
    return [torch.stack(part).sum(0) / len(part) for part in members]


# docs/methods/seed.md.


def seed(students: Tensor, teachers: Rows, queue: Tensor, tau_s: float, tau_t: float) -> Tensor:
    """Cross-entropy of two distributions of similarities, the image's own embedding included."""
    losses = []
    for z_s, z_t in zip(units(students), teachers, strict=True):
        table = [z_t, *queue]
        p_s, p_t = softmax(dots(z_s, table) / tau_s), softmax(dots(z_t, table) / tau_t)
        losses.append(-(p_t * torch.log(p_s)).sum())
    return mean(losses)


# docs/methods/protoseed.md, protocpc.md.


def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Prototypes get mass N / K each, then samples 1 each, by turns."""
    q = torch.exp(scores / epsilon)
    n, k = q.shape
    for _ in range(iterations):
        for column in range(k):
            q[:, column] = q[:, column] / q[:, column].sum() * n / k
        for row in range(n):
            q[row] = q[row] / q[row].sum()
    return q


def protocpc(
    students: Tensor, assigned: Tensor, prototypes: Tensor, prior: Tensor, tau: float
) -> Tensor:
    """Eq. 4: alignment and uniformity."""
    losses = []
    for z, p in zip(units(students), assigned, strict=True):
        s = prototypes @ z / tau
        losses.append(-(p * s).sum() + torch.log((prior * torch.exp(s)).sum()))
    return mean(losses)


# docs/methods/metric.md and docs/reference/losses.md.


def soft_nearest_neighbor(views: Sequence[Tensor], temperature: float) -> Tensor:
    """Eq. 1 of Frosst et al., of all crops; those of an image are of one class."""
    rows = [(image, row) for view in views for image, row in enumerate(units(view))]
    losses = []
    for i, (own, x) in enumerate(rows):
        others = [(image, y) for j, (image, y) in enumerate(rows) if j != i]
        apart = ((torch.stack([y for _, y in others]) - x) ** 2).sum(1)
        e = torch.exp(-apart / temperature)
        same = torch.stack([one for one, (image, _) in zip(e, others, strict=True) if image == own])
        losses.append(-torch.log(same.sum() / e.sum()))
    return mean(losses)


def semi_hard_triplets(views: Sequence[Tensor], pairs: Pairs, margin: float) -> Tensor:
    """Of a crop, another crop of the image, and another image's: the nearest beyond that.

    If none lies beyond, it is the farthest (FaceNet, as public code completes it).
    """
    rows, losses = [units(view) for view in views], []
    for image in range(len(rows[0])):
        for own, other in pairs:
            anchor = rows[own][image]
            near = squared_distance(anchor, rows[other][image])
            # Both are of the same crop: augmentation does not tell them apart.
            far = [squared_distance(anchor, n) for j, n in enumerate(rows[other]) if j != image]
            beyond = [d for d in far if float(d.detach()) > float(near.detach())]
            chosen = min(beyond, key=_value) if beyond else max(far, key=_value)
            losses.append(torch.clamp(near - chosen + margin, min=0))
    return mean(losses)


def _value(x: Tensor) -> float:
    return float(x.detach())


def arcface(
    views: Sequence[Tensor], labels: Tensor, weights: Tensor, scale: float, margin: float
) -> Tensor:
    """Eq. 3 of Deng et al., of all crops; beyond pi - m the target's logit goes on falling."""
    losses, classes = [], units(weights)
    for view in views:
        for x, label in zip(units(view), labels, strict=True):
            cosines = dots(x, classes)
            theta = torch.arccos(cosines[label])
            target = torch.cos(theta + margin)
            if _value(theta) > math.pi - margin:
                target = cosines[label] - margin * math.sin(margin)
            logits = [target if c == label else s for c, s in enumerate(cosines)]
            losses.append(-torch.log(softmax(scale * torch.stack(logits))[label]))
    return mean(losses)


def alignment(views: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """Mean squared distance of pairs of an image's crops."""
    rows, images = [units(view) for view in views], range(len(views[0]))
    return mean([squared_distance(rows[a][i], rows[b][i]) for a, b in pairs for i in images])


def uniformity(rows: Rows) -> Tensor:
    """Logarithm of the mean potential of all pairs of rows."""
    pairs = itertools.combinations(rows, 2)
    return torch.log(mean([torch.exp(-2 * squared_distance(a, b)) for a, b in pairs]))
