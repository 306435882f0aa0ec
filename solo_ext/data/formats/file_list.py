"""A text file that lists images and their classes."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import load_image

FORMAT = "give a folder, or a text file with a line `path label` for every image"

_LONGEST_NAME = 120
_MOST_CLASSES = 100_000
"""That whole numbers may name where there are not as many images."""


class FileList(Dataset[tuple[Image.Image, int]]):
    """The images of a text file with one line ``path label`` each, in its order.

    Paths are relative to the list's folder or absolute, and may hold spaces. Labels are whole
    numbers from 0, of which a negative one is none (-1), or names, which are numbered in sorted
    order. Empty lines and lines that begin with ``#`` are left out.

    Args:
        file: the list.
        key: of the config, for messages.
        labelled: whether lines end in a label; without, targets are -1.
        present: whether a file that is not there is refused.

    Attributes:
        samples: path and target of every image.
        classes: names of the classes.

    Raises:
        ConfigError: a file that is no such list, or one that names a file that is not there.
        OSError: the list cannot be read.
    """

    def __init__(
        self, file: Path, key: str, labelled: bool = True, *, present: bool = True
    ) -> None:
        self._file, self._key, self._present = file, key, present
        rows = [self._row(number, line, labelled) for number, line in self._lines()]
        self.classes, numbers = self._numbered([label for _, label in rows])
        self.samples = [(path, numbers[label]) for path, label in rows]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(path), target

    @property
    def targets(self) -> list[int]:
        """Targets of all samples."""
        return [target for _, target in self.samples]

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(self._key, str(self._file), problem, FORMAT)

    def _lines(self) -> list[tuple[int, str]]:
        try:
            text = self._file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise self._refusal("a file that is no text") from None
        # Names may hold what else Python takes for the end of a line.
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
        return [(number, line) for number, line in lines if line and not line.startswith("#")]

    def _row(self, number: int, line: str, labelled: bool) -> tuple[str, str | None]:
        name, label = line, None
        if labelled:
            name, _, label = line.replace("\t", " ").rpartition(" ")
            if not name.strip():
                raise self._refusal(f"line {number} has no label")
        path = self._file.parent / name.strip()
        if self._present:
            self._refuse_missing(path, number, name.strip())
        return str(path), label

    def _refuse_missing(self, path: Path, number: int, name: str) -> None:
        reason = ""
        try:
            if path.is_file():
                return
        except OSError as error:
            reason = f" ({error.strerror})"
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise self._refusal(f"line {number} names {shown!r}, which is no file{reason}")

    def _numbered(self, labels: list[str | None]) -> tuple[list[str], dict[str | None, int]]:
        """Names of the classes, and the target of every label."""
        found = {label for label in labels if label is not None}
        if not found:
            return [], {None: -1}
        # Python makes no number of thousands of digits.
        if not all(
            label.removeprefix("-").isdecimal() and len(label) <= _LONGEST_NAME for label in found
        ):
            names = sorted(found)
            return names, {name: number for number, name in enumerate(names)}
        targets: dict[str | None, int] = {label: max(int(label), -1) for label in found}
        classes = max(targets.values()) + 1
        odd = min((label for label in found if label != str(int(label))), default=None)
        if odd is not None:
            raise self._refusal(
                f"label {odd!r} is neither a whole number nor a name: write it without leading "
                "zeros, or with a letter"
            )
        if classes > max(_MOST_CLASSES, len(labels)):
            raise self._refusal(
                f"label '{classes - 1}' asks for {classes} classes of {len(labels)} images: "
                "number them from 0, or write names with a letter"
            )
        return [str(n) for n in range(classes)], targets
