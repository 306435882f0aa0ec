"""``eval neighbors``."""

from __future__ import annotations

from typing import ClassVar

from solo_ext.config.schema import Seed
from solo_ext.config.types import PositiveInt
from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import Images
from solo_ext.data.transforms import FixedView
from solo_ext.lab.evaluation.pictures.images import queries_of_all_classes
from solo_ext.lab.evaluation.pictures.neighbours import Shown, nearest, write_grid
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, Row
from solo_ext.lab.evaluation.subject import EvalContext

FILE = "neighbors.png"


class Neighbors(BackboneProtocol):
    """Settings of ``eval neighbors``: test images beside the nearest training images."""

    title: ClassVar[str] = "Nearest neighbours"

    queries: PositiveInt = 10
    k: PositiveInt = 8
    seed: Seed = 0

    def run(self, subject: EvalContext) -> list[Row]:
        """One row: ``queries`` shown, ``k``, ``precision`` over the test split, ``picture``.

        ``precision`` is the percentage of the k nearest training images, by cosine similarity,
        that are of the class of the test image, over all of them and not only those shown.

        Raises:
            ConfigError: fewer labelled training images than ``k``, or no labelled test image.
        """
        found = subject.features
        labelled = found.train_targets >= 0
        if int(labelled.sum()) < self.k:
            raise ConfigError(
                "k", self.k, f"there are {int(labelled.sum())} training images", "take fewer"
            )
        rows = queries_of_all_classes(found.test_targets, self.queries, self.seed)
        if not len(rows):
            raise ConfigError(
                "data.val_path", None, "no test image has a label", "give class folders"
            )
        bank = labelled.nonzero().flatten()
        device = found.device
        rows_of_bank = found.train if bool(labelled.all()) else found.train[labelled]
        places, similarities = nearest(found.test.to(device), rows_of_bank.to(device), self.k)
        places, similarities = bank[places.cpu()], similarities.cpu()
        right = found.train_targets[places] == found.test_targets[:, None]
        known = found.test_targets >= 0
        view = FixedView(subject.cfg["augmentations"][0]["crop_size"])
        names = subject.class_names

        def shown(images: Images, index: int, similarity: float | None, own: bool) -> Shown:
            image, target = images[index]
            return Shown(view(image.convert("RGB")), names[target], similarity, own)

        grid = [
            [
                shown(subject.test, query, None, True),
                *(
                    shown(
                        subject.train,
                        int(places[query, i]),
                        float(similarities[query, i]),
                        bool(right[query, i]),
                    )
                    for i in range(self.k)
                ),
            ]
            for query in rows.tolist()
        ]
        precision = 100.0 * float(right[known].float().mean())
        title = subject.cfg.get("method") or subject.model.name
        subject.out.mkdir(parents=True, exist_ok=True)
        about = f"{title}: precision at {self.k} over the test split {precision:.1f} %"
        write_grid(grid, about, subject.out / FILE)
        return [{"queries": len(rows), "k": self.k, "precision": precision, "picture": FILE}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The precision."""
        return {"precision": float(rows[0]["precision"])}
