"""Self-supervised methods that solo-learn lacks, selectable by name in its configs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solo_ext.lab.end_to_end import Trained
    from solo_ext.lab.evaluation.embed import Embedded
    from solo_ext.pretrained.exported import Exported

__all__ = ["__version__", "embed", "load_exported", "pretrain", "register", "report"]
try:
    __version__ = version("solo-ext")
except PackageNotFoundError:
    # solo_ext runs from a checkout on the path that was never installed.
    __version__ = "0.0"


def embed(
    model: str | Path,
    images: str | Path | Sequence[str | Path] | None = None,
    out: str | Path = "embeddings.parquet",
    **settings: Any,
) -> Embedded:
    """Writes the features of images to a Parquet file, one row per image.

    ``settings`` are those of ``solo-ext embed``, such as ``batch_size=64``; see
    :func:`solo_ext.lab.evaluation.embed.embed`.
    """
    from solo_ext.lab.evaluation.embed import embed as write

    return write(model, images, out, settings)


def load_exported(path: str | Path) -> Exported:
    """Loads a model that ``solo-ext export`` wrote.

    See :func:`solo_ext.pretrained.exported.load_exported`.
    """
    from solo_ext.pretrained.exported import load_exported as load

    return load(path)


def pretrain(
    images: str | Path | Sequence[str | Path],
    method: str | None = None,
    settings: Sequence[str] = (),
    *,
    teacher: str | None = None,
    run_dir: str | Path | None = None,
) -> Trained:
    """Trains on pictures, as ``solo-ext pretrain IMAGES`` does.

    Args:
        images: a folder of any depth, several, or a file that lists images.
        method: name of a method; if it is ``None`` ``pcl``, or ``protoseed`` with a teacher.
        settings: ``key=value``, such as ``"max_epochs=50"``; all others follow from the images.
        teacher: what to distil: ``timm/<model>``, ``torchvision/<model>``, a run or a file.
        run_dir: where to write; continued if it holds this run.

    Returns:
        The run: its directory, the model, and how it is loaded.

    Raises:
        UserError: the images or a setting cannot be used.
    """
    from solo_ext.lab.end_to_end import pretrain_images

    paths = [images] if isinstance(images, str | Path) else images
    place = None if run_dir is None else Path(run_dir)
    return pretrain_images(
        [str(path) for path in paths], method, settings, teacher=teacher, run_dir=place
    )


def register() -> None:
    """Adds the methods and losses of this plugin and of third parties to solo-learn.

    Repeated calls change nothing; see :func:`solo_ext.plugin.register`.
    """
    from solo_ext.plugin import register as fill

    fill()


def report(
    run: str | Path,
    images: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path | None = None,
    samples: int = 5000,
) -> Path:
    """Writes the page of a run, as ``solo-ext report`` does.

    Args:
        run: a run directory.
        images: a folder of any depth, several, or a file that lists images; by default the images
            that the run was trained on.
        out: the file; ``None``: ``report.html`` in the run directory.
        samples: most images that are shown.

    Returns:
        The file.

    Raises:
        UserError: there is no such run, or its images cannot be read.
    """
    from solo_ext.lab.report.run_page import report as write

    paths = [images] if isinstance(images, str | Path) else images
    return write(run, paths, out=None if out is None else Path(out), samples=samples)
