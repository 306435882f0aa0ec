"""Galleries of a run's page: clusters, nested clusters, neighbours, near duplicates, outliers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from solo_ext.lab.evaluation.sample import Clusters, Sample
from solo_ext.lab.pages import Block, Card, Cards, Gallery, Paragraph, Picture, Section, Table
from solo_ext.lab.report.thumbnails import Thumbnails
from solo_ext.memory.knn import nearest_neighbors

MOST_COMPARED = 20_000
"""Most images that are compared with each other; of more images a sample is drawn."""
DUPLICATE = 0.99
"""Cosine above which two images count as near duplicates."""
_GRANULARITIES, _EXTREMES, _NEAREST, _FARTHEST = 4, 3, 6, 3
_PARENTS, _CHILDREN = 6, 7
_QUERIES, _NEIGHBOURS = 8, 8
_PAIRS, _OUTLIERS = 10, 12
_SIDE = 112


class Galleries:
    """Makes the sections that show pictures, and counts the bytes of these.

    Attributes:
        bytes: of all pictures so far.

    >>> images = Sample(list("abcd"), np.eye(4), lambda row: 1 / 0)
    >>> [section.title for section in Galleries(images, Thumbnails(images)).sections()]
    ['Nearest neighbours', 'Near duplicates', 'Outliers']
    """

    def __init__(self, sample: Sample, thumbnails: Thumbnails, seed: int = 0) -> None:
        self.sample, self.thumbnails, self.seed = sample, thumbnails, seed
        self.bytes = 0

    def sections(self) -> Iterator[Section]:
        """Clusters if there are any, neighbours, near duplicates and outliers."""
        if self.sample.clusters:
            yield from self._clusters()
        if len(self.sample) > 1:
            yield from self._similar()

    def _gallery(
        self, rows: Sequence[int], notes: Sequence[str], caption: str = "", lead: int = 0
    ) -> Gallery:
        images = self.thumbnails.encode(rows, _SIDE)
        self.bytes += sum(map(len, images))
        names = [self.sample.names[row] for row in rows]
        pictures = [Picture(*each) for each in zip(names, images, notes, strict=True)]
        return Gallery(pictures, caption, lead)

    def _clusters(self) -> Iterator[Section]:
        found = sorted(self.sample.clusters.items())
        if len(found) > _GRANULARITIES:
            # The coarsest, the finest, and some between.
            places = np.linspace(0, len(found) - 1, _GRANULARITIES).round().astype(int)
            found = [found[place] for place in places]
        sizes = [f"{k:,}" for k, _ in found]
        text = (
            "A prototype is the middle of a cluster. A concentration is the mean distance of a "
            "cluster's images to its prototype, made larger for small clusters: small is tight. "
            "Each row begins with the images nearest to the prototype; the farthest ones follow."
        )
        yield Section(f"Clusters ({', '.join(sizes)})", [Paragraph(text, "soft")])
        for k, clusters in found:
            counts = list(clusters.sizes.values())
            cards = Cards(
                [
                    Card("Clusters", f"{len(counts):,}", f"of {k:,}, with at least one image"),
                    Card("Median size", f"{np.median(counts):,.0f}"),
                    Card("Smallest, largest", f"{min(counts):,}, {max(counts):,}"),
                    Card("Of one image", f"{counts.count(1):,}"),
                ]
            )
            yield Section(f"{k:,} clusters", [cards, *self._extremes(clusters)], level=3)
        for (coarse, of_coarse), (fine, of_fine) in pairwise(found):
            yield self._nesting(coarse, of_coarse, fine, of_fine)

    def _extremes(self, clusters: Clusters) -> Iterator[Block]:
        """The tightest and the loosest clusters, of those large enough to judge."""
        large = [c for c, size in clusters.sizes.items() if size >= _NEAREST]
        known = clusters.concentrations
        ranked = sorted(large, key=lambda c: (known[c], c))
        if not ranked:
            yield Paragraph(f"No cluster has {_NEAREST} images.", "soft")
        tight = ranked[: max(1, min(_EXTREMES, len(ranked) // 2))]
        loose = [c for c in ranked[: -_EXTREMES - 1 : -1] if c not in tight]
        for name, chosen in (("Tight", tight), ("Loose", loose)):
            for cluster in chosen if ranked else ():
                members = clusters.members(cluster)
                near = members[:_NEAREST]
                far = members[max(_NEAREST, len(members) - _FARTHEST) :]
                rows = [*near, *far]
                notes = [f"{clusters.distances[row]:.3g}" for row in rows]
                caption = (
                    f"{name}: cluster {cluster}, {len(members):,} images, "
                    f"concentration {known[cluster]:.3g}"
                )
                yield self._gallery(rows, notes, caption, lead=len(near) if len(far) else 0)

    def _nesting(self, coarse: int, upper: Clusters, fine: int, lower: Clusters) -> Section:
        """Which fine clusters lie in each of the largest coarse ones."""
        span = int(upper.assignments.max()) + 1
        codes = lower.assignments.astype(np.int64) * span + upper.assignments
        pairs, counts = np.unique(codes, return_counts=True)
        home: dict[int, tuple[int, int]] = {}
        for code, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            child, parent = divmod(code, span)
            if count > home.get(child, (0, 0))[1]:
                home[child] = (parent, count)
        share = sum(count for _, count in home.values()) / len(self.sample)
        blocks: list[Block] = [
            Paragraph(
                f"{share:.0%} of the images are in the same of {coarse:,} coarse clusters as "
                f"most of their fine cluster of {fine:,}. Each row shows the image nearest to the "
                "prototype of a coarse cluster, then those of the fine clusters in it."
            )
        ]
        largest = sorted(upper.sizes, key=lambda c: (-upper.sizes[c], c))[:_PARENTS]
        for parent in largest:
            children = [(count, c) for c, (of, count) in home.items() if of == parent]
            children = sorted(children, key=lambda one: (-one[0], one[1]))
            if not children:
                continue
            rows = [upper.members(parent)[0]]
            notes = [f"{upper.sizes[parent]:,} images"]
            for count, child in children[:_CHILDREN]:
                rows.append(lower.members(child)[0])
                notes.append(f"{count:,} of {lower.sizes[child]:,}")
            more = len(children) - _CHILDREN
            are = "cluster lies" if len(children) == 1 else "clusters lie"
            caption = f"Cluster {parent}: {len(children)} fine {are} mostly in it"
            caption += f", {_CHILDREN} are shown" if more > 0 else ""
            blocks.append(self._gallery(rows, notes, caption, lead=1))
        return Section(f"{fine:,} clusters within {coarse:,}", blocks, level=3)

    def _similar(self) -> Iterator[Section]:
        """Neighbours, near duplicates and outliers, all from one table of nearest rows."""
        n, names = len(self.sample), self.sample.names
        rng = np.random.default_rng(self.seed)
        rows = np.sort(rng.permutation(n)[:MOST_COMPARED])
        about = f"Of a sample of {len(rows):,} of the {n:,} images. " if len(rows) < n else ""
        places, cosines = neighbours(self.sample.embeddings[rows], _NEIGHBOURS)
        galleries: list[Block] = []
        for query in np.sort(rng.permutation(len(rows))[:_QUERIES]).tolist():
            row = [rows[query], *rows[places[query]]]
            notes = ["", *(f"{cosine:.3f}" for cosine in cosines[query])]
            galleries.append(self._gallery(row, notes, lead=1))
        text = f"{about}Each row is an image, then those with the largest cosines to it."
        yield Section("Nearest neighbours", [Paragraph(text, "soft"), *galleries])

        found = near_duplicates(places, cosines)
        above = sum(cosine > DUPLICATE for _, _, cosine in found)
        table, galleries = [], list[Block]()
        for place, (first, second, cosine) in enumerate(found[:_PAIRS], 1):
            both, note = [rows[first], rows[second]], f"{cosine:.4f}"
            galleries.append(self._gallery(both, [note, note], f"Pair {place}"))
            table.append([names[rows[first]], names[rows[second]], note])
        pairs = "pair has" if above == 1 else "pairs have"
        text = (
            f"{about}{above:,} {pairs} a cosine above {DUPLICATE}, counted among the "
            f"{places.shape[1]} nearest neighbours of each image; the most alike are shown. "
            "A network that has hardly learned takes pictures that differ for duplicates."
        )
        listed = Table(["Image", "Its near duplicate", "Cosine"], table, frozenset({2}))
        yield Section("Near duplicates", [Paragraph(text, "soft"), *galleries, listed])

        means = cosines.mean(1)
        lowest = np.argsort(means, kind="stable")[:_OUTLIERS]
        text = f"{about}Images with the lowest mean cosine to their {places.shape[1]} neighbours."
        outliers = rows[lowest].tolist()
        values = [f"{means[place]:.3f}" for place in lowest]
        listed = Table(
            ["Image", "Mean cosine"],
            [[names[row], value] for value, row in zip(values, outliers, strict=True)],
            frozenset({1}),
        )
        gallery = self._gallery(outliers, values)
        yield Section("Outliers", [Paragraph(text, "soft"), gallery, listed])


def neighbours(x: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Each row's nearest other rows by cosine similarity, the nearest first.

    Args:
        x: (n, D), n at least 2.
        k: how many; at most n - 1 are returned.

    Returns:
        Their places and cosines, both (n, min(k, n - 1)).

    >>> neighbours(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), k=1)[0].tolist()
    [[1], [0], [0]]
    """
    k = min(k, len(x) - 1)
    bank = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    found, values = nearest_neighbors(bank, bank, k, own=torch.arange(len(bank)))
    return found.numpy(), values.numpy().astype(np.float64)


def near_duplicates(
    places: NDArray[np.int64], cosines: NDArray[np.float64]
) -> list[tuple[int, int, float]]:
    """Pairs of rows that are neighbours, each once, by descending cosine.

    >>> near_duplicates(np.array([[1], [0], [0]]), np.array([[1.0], [1.0], [0.5]]))
    [(0, 1, 1.0), (0, 2, 0.5)]
    """
    n, k = places.shape
    first, second = np.repeat(np.arange(n), k), places.ravel()
    low, high = np.minimum(first, second), np.maximum(first, second)
    _, once = np.unique(low * n + high, return_index=True)
    order = once[np.argsort(-cosines.ravel()[once], kind="stable")]
    return [(int(low[i]), int(high[i]), float(cosines.ravel()[i])) for i in order]
