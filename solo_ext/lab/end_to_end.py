"""From a user's pictures to a model and a page: what ``solo-ext pretrain IMAGES`` does in all."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from solo_ext.core.errors import StoppedBySignal, UserError
from solo_ext.lab.ending import log_traceback
from solo_ext.lab.report.run_page import report
from solo_ext.lab.training.own_images import plan_run
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import PretrainResult, pretrain, resume
from solo_ext.lab.training.run_dir import resume_hint
from solo_ext.pretrained.export import Export, Format, export

CHOICES = "choices.txt"
"""File of a run directory: the block that says what was chosen. Only such a run has it."""
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

    >>> pretrain_images(["/nowhere"])
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: IMAGES='/nowhere': no such folder; give a folder of ...
    """
    plan = plan_run(images, method, overrides, teacher=teacher)
    for line in plan.lines():
        say(line)
    records = {CHOICES: "".join(f"{line}\n" for line in plan.lines())}
    result = pretrain(prepare(plan.config), run_dir=run_dir, force=force, records=records)
    return _finished(result, say)


def go_on(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    force: bool = False,
    say: Callable[[str], object] = print,
) -> PretrainResult:
    """Continues a run; one on a user's images ends with its model and its page too.

    Args:
        run_dir: as for :func:`~solo_ext.lab.training.pretrain.resume`, as are ``overrides`` and
            ``force``.
        say: called with a line if there is no page.

    Raises:
        UserError: as :func:`~solo_ext.lab.training.pretrain.resume`.

    >>> go_on(Path("nowhere"))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    result = resume(run_dir, overrides, force=force)
    return _finished(result, say) if (run_dir / CHOICES).is_file() else result


def _finished(result: PretrainResult, say: Callable[[str], object]) -> Trained:
    done = Trained(**vars(result))
    if getattr(rank_zero_only, "rank", 0) or result.checkpoint is None:
        return done
    try:
        model = _exported(result.run_dir)
        done = replace(done, model=model.out, load=model.load)
        return replace(done, report=report(result.run_dir, samples=_SHOWN))
    except KeyboardInterrupt:
        hint = resume_hint(result.run_dir)
        raise StoppedBySignal(f"stopped by SIGINT; {hint}", signal.SIGINT) from None
    except Exception as error:
        # The run is whole without them.
        what = "page" if done.model else "model and page"
        said = str(error) if isinstance(error, UserError) else log_traceback(error)
        say(f"no {what} of the run: {said}")
        return done


def _exported(run_dir: Path) -> Export:
    """The model in the run directory: a folder for plain timm if timm can build the network."""
    try:
        return _placed(run_dir, "timm")
    except UserError:
        return _placed(run_dir, "safetensors")


def _placed(run_dir: Path, form: Format) -> Export:
    """Exports beside what ``solo-ext export`` writes, in place of an earlier model of the run."""
    names: dict[Format, str] = {"timm": "model", "safetensors": "model.safetensors"}
    scratch, target = run_dir / f".{names[form]}", run_dir / names[form]
    _remove(scratch)
    done = export(run_dir, form, scratch)
    for earlier in names.values():
        _remove(run_dir / earlier)
    scratch.rename(target)
    return replace(done, out=target)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
