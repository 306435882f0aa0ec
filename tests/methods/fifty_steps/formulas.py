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


def unit(x: Tensor) -> Tensor:
    """A vector of length 1."""
    return x / (x * x).sum().sqrt()


def units(x: Tensor) -> list[Tensor]:
    """The rows of a matrix, each of length 1."""
    return [unit(row) for row in x]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Of two vectors."""
    return (a * b).sum()


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


def negative_mass(s_p: Tensor, s_k: Tensor, temperature: float, tau: float, beta: float) -> Tensor:
    """``N g`` of Eq. 4 of hard negatives, which with beta 0 is Eq. 7 and 8 of debiased."""
    r = torch.exp((1 + beta) * s_k).sum() / torch.exp(beta * s_k).sum()
    g = (r - tau * torch.exp(s_p)) / (1 - tau)
    return len(s_k) * torch.clamp(g, min=math.exp(-1 / temperature))


def against_the_batch(
    views: Sequence[Tensor], temperature: float, tau: float, beta: float
) -> Tensor:
    """Every crop with the other crops of its image; negatives: all crops of the other images."""
    rows, losses = [units(view) for view in views], []
    for image in range(len(rows[0])):
        for own, other in itertools.permutations(range(len(rows)), 2):
            anchor = rows[own][image]
            s_p = dot(anchor, rows[other][image]) / temperature
            s_k = [dot(anchor, n) for view in rows for j, n in enumerate(view) if j != image]
            mass = negative_mass(s_p, torch.stack(s_k) / temperature, temperature, tau, beta)
            losses.append(-torch.log(torch.exp(s_p) / (torch.exp(s_p) + mass)))
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
    temperature, losses = constants["temperature"], []
    tau, beta = constants.get("tau_plus", 0.0), constants.get("beta", 0.0)
    for i, (query, key) in enumerate(zip(units(queries), keys, strict=True)):
        negatives = list(queue)
        if draws is not None:
            negatives += mixtures(query, queue, draws, i)
        s_p = dot(query, key) / temperature
        s_k = torch.stack([dot(query, n) for n in negatives]) / temperature
        mass = negative_mass(s_p, s_k, temperature, tau, beta)
        losses.append(-torch.log(torch.exp(s_p) / (torch.exp(s_p) + mass)))
    return mean(losses)


# docs/methods/nnclr_symmetric.md.


def nearest(z: Tensor, support: Tensor) -> Tensor:
    """The row of the support set that is most similar."""
    best = max(range(len(support)), key=lambda row: float(dot(unit(z), support[row])))
    return support[best]


def rows_and_columns(neighbours: Rows, predictions: Tensor, temperature: float) -> Tensor:
    """Half the sum of the loss over rows and of that over columns."""
    q, n = units(predictions), len(neighbours)
    e = [[torch.exp(dot(neighbours[i], q[k]) / temperature) for k in range(n)] for i in range(n)]
    rows = [-torch.log(e[i][i] / sum(e[i])) for i in range(n)]
    columns = [-torch.log(e[i][i] / sum(e[k][i] for k in range(n))) for i in range(n)]
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
        s = [torch.exp(dot(query, c) / f) for c, f in zip(prototypes, phi, strict=True)]
        columns = range(len(s)) if others is None else [*own, *others]
        losses.append(-torch.log(s[own[i]] / sum(s[j] for j in columns)))
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
    x, best, lowest = torch.stack(list(features)), list[int](), math.inf
    for start in itertools.combinations(range(len(x)), count):
        middles, own = x[list(start)], list[int]()
        while True:
            apart = ((x.unsqueeze(1) - middles) ** 2).sum(2)
            now = apart.argmin(1).tolist()
            if now == own or len(set(now)) < count:
                break
            own = now
            middles = torch.stack(means_of(features, own, count))
        objective = float(apart.amin(1).sum())
        if objective < lowest and len(set(now)) == count:
            best, lowest = now, objective
    return best


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
        p_s = softmax(torch.stack([dot(z_s, d) for d in table]) / tau_s)
        p_t = softmax(torch.stack([dot(z_t, d) for d in table]) / tau_t)
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
        s = torch.stack([dot(z, w) for w in prototypes]) / tau
        losses.append(-(p * s).sum() + torch.log((prior * torch.exp(s)).sum()))
    return mean(losses)


# docs/methods/metric.md and docs/reference/losses.md.


def soft_nearest_neighbor(views: Sequence[Tensor], temperature: float) -> Tensor:
    """Eq. 1 of Frosst et al., of all crops; those of an image are of one class."""
    rows = [(image, row) for view in views for image, row in enumerate(units(view))]
    losses = []
    for i, (own, x) in enumerate(rows):
        others = [
            (image, torch.exp(-squared_distance(x, y) / temperature))
            for j, (image, y) in enumerate(rows)
            if j != i
        ]
        same = torch.stack([e for image, e in others if image == own]).sum()
        losses.append(-torch.log(same / torch.stack([e for _, e in others]).sum()))
    return mean(losses)


def semi_hard_triplets(views: Sequence[Tensor], margin: float) -> Tensor:
    """Of every crop, the image's other crop, and another image's: the nearest beyond that.

    If none lies beyond, it is the farthest (FaceNet, as public code completes it).
    """
    rows, losses = [units(view) for view in views], []
    for image in range(len(rows[0])):
        for own, other in itertools.permutations(range(len(rows)), 2):
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
            cosines = [dot(x, w) for w in classes]
            theta = torch.arccos(cosines[label])
            target = torch.cos(theta + margin)
            if _value(theta) > math.pi - margin:
                target = cosines[label] - margin * math.sin(margin)
            logits = [target if c == label else s for c, s in enumerate(cosines)]
            losses.append(-torch.log(softmax(scale * torch.stack(logits))[label]))
    return mean(losses)


def alignment(views: Sequence[Tensor]) -> Tensor:
    """Mean squared distance of an image's two crops."""
    pairs = zip(*(units(view) for view in views), strict=True)
    return mean([squared_distance(a, b) for a, b in pairs])


def uniformity(rows: Rows) -> Tensor:
    """Logarithm of the mean potential of all pairs of rows."""
    pairs = itertools.combinations(rows, 2)
    return torch.log(mean([torch.exp(-2 * squared_distance(a, b)) for a, b in pairs]))
