"""``eval map``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, MinLen

from solo_ext.config.schema import Seed
from solo_ext.config.types import NonNegativeFloat, PositiveFloat, PositiveInt
from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.pictures.images import image_names, seeded_sample
from solo_ext.lab.evaluation.pictures.page import write_page
from solo_ext.lab.evaluation.pictures.projection import (
    TITLES,
    Method,
    Projection,
    kept_neighbours,
    principal_axes,
)
from solo_ext.lab.evaluation.pictures.scatter import Map, write_png
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, Row
from solo_ext.lab.evaluation.subject import EvalContext

PAGE = "map.html"
_FEWEST = 4


class FeatureMap(BackboneProtocol):
    """Settings of ``eval map``: features in two dimensions, as pictures and as a page."""

    title: ClassVar[str] = "Map of the features"

    methods: Annotated[list[Method], MinLen(1)] = ["pca", "tsne", "umap"]
    split: Literal["test", "train"] = "test"
    max_images: PositiveInt = 5000
    max_classes: PositiveInt = 20
    perplexity: PositiveFloat = 30.0
    n_neighbors: Annotated[int, Ge(2)] = 15
    min_dist: NonNegativeFloat = 0.1
    html: bool = True
    seed: Seed = 0

    def run(self, subject: EvalContext) -> list[Row]:
        """One row per method: ``method``, ``images``, ``trustworthiness``, ``picture``, ``page``.

        Raises:
            ConfigError: fewer than four labelled images.
        """
        found = subject.features
        if self.split == "test":
            images, x, targets = subject.test, found.test, found.test_targets
        else:
            images, x, targets = subject.train, found.train, found.train_targets
        rows = seeded_sample(targets, self.max_images, self.max_classes, self.seed)
        if len(rows) < _FEWEST:
            raise ConfigError(
                "max_images", self.max_images, f"leaves {len(rows)} images", "a map needs four"
            )
        x, targets = x[rows].float(), targets[rows]
        names = image_names(images, rows.tolist())
        layout = Projection(self.perplexity, self.n_neighbors, self.min_dist, self.seed)
        subject.out.mkdir(parents=True, exist_ok=True)
        report = subject.report("maps")
        present = len(torch.unique(targets))
        title = f"{subject.cfg.get('method') or subject.model.name}"
        about = f"{len(rows)} {self.split} images of {present} classes"
        if present < subject.num_classes:
            about += f" (of {subject.num_classes})"
        maps: dict[str, Map] = {}
        axes: dict[str, tuple[str, str]] = {}
        measured: list[Row] = []
        for done, method in enumerate(dict.fromkeys(self.methods), start=1):
            points = layout.points(x, method)
            one = Map(points, targets.numpy(), subject.class_names, names)
            maps[TITLES[method]] = one
            if method == "pca":
                axes[TITLES[method]] = principal_axes(x, points)
            picture = f"map_{method}.png"
            label = axes.get(TITLES[method])
            write_png(one, f"{TITLES[method]} of {title}, {about}", label, subject.out / picture)
            kept = round(kept_neighbours(x, points), 4)
            row: Row = {"method": method, "images": len(rows), "trustworthiness": kept}
            measured.append({**row, "picture": picture})
            if report is not None:
                report(done, len(self.methods))
        if self.html:
            write_page(maps, axes, title, about, subject.out / PAGE)
            measured = [{**row, "page": PAGE} for row in measured]
        return measured

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Trustworthiness by method."""
        return {f"trustworthiness_{r['method']}": float(r["trustworthiness"]) for r in rows}
