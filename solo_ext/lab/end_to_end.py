"""From a user's pictures to a model and a page: what ``solo-ext pretrain IMAGES`` does in all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from solo_ext.core.distributed import rank
from solo_ext.core.errors import UserError
from solo_ext.lab.report.run_page import report
from solo_ext.lab.training.own_images import plan_run
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import PretrainResult, pretrain
from solo_ext.pretrained.export import DEFAULT_NAMES, Export, export

_SHOWN = 2000
"""Images that are embedded for the page at the end of a run."""


@dataclass(frozen=True)
class Trained(PretrainResult):
    """A finished run on a user's images.

    Attributes:
        model: the backbone's weights, as ``solo-ext export`` writes them.
        load: Python code that loads them.
        report: the page of the run; ``None`` if what draws it is not installed.

    >>> Trained(Path("run"), None, 100, 60.0, images_per_second=900.0).model is None
    True
    """

    model: Path | None = None
    load: str | None = None
    report: Path | None = None


def pretrain_images(
    images: Sequence[str],
    method: str | None = None,
    overrides: Sequence[str] = (),
    *,
    teacher: str | None = None,
    run_dir: Path | None = None,
    force: bool = False,
    say: Callable[[str], object] = print,
) -> Trained:
    """Trains on a user's images with settings that follow from them; writes the model and a page.

    Args:
        images: as for :func:`plan_run`, as are ``method``, ``overrides`` and ``teacher``.
        run_dir: as for :func:`~solo_ext.lab.training.pretrain.pretrain`, as is ``force``.
        say: called with each line of the block that says what was chosen.

    Raises:
        UserError: as :func:`plan_run` and :func:`~solo_ext.lab.training.pretrain.pretrain`.
    """
    plan = plan_run(images, method, overrides, teacher=teacher)
    for line in plan.lines():
        say(line)
    result = pretrain(prepare(plan.config), run_dir=run_dir, force=force)
    if rank() or result.checkpoint is None:
        return Trained(**vars(result))
    model = _exported(result.run_dir)
    done = Trained(**vars(result), model=model.out, load=model.load)
    try:
        return replace(done, report=report(result.run_dir, samples=_SHOWN))
    except UserError as error:
        # The run is whole without its page.
        say(f"no page of the run: {error}")
        return done


def _exported(run_dir: Path) -> Export:
    """The model in the run directory: a folder for plain timm if timm can build the network."""
    for form in DEFAULT_NAMES:
        written = run_dir / DEFAULT_NAMES[form]
        # It is of an earlier call that trained less.
        shutil.rmtree(written) if written.is_dir() else written.unlink(missing_ok=True)
    try:
        return export(run_dir, "timm")
    except UserError:
        return export(run_dir, "safetensors")
