"""How many steps a run has, and what that means for its learning rate."""

from __future__ import annotations

import logging
import math

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError

logger = logging.getLogger(__name__)


def _batches_of_an_epoch(run: RunConfig, images: int) -> int:
    """Batches that each process trains on in an epoch."""
    batches = images // run.world_size // run.optimizer.batch_size
    limit = (run.model_extra or {}).get("limit_train_batches")
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def check_accumulation(run: RunConfig, images: int) -> None:
    """Refuses to accumulate more batches than an epoch has.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> check_accumulation(check_run(compose("digits/simclr")), images=1000)
    """
    # Lightning ends a step with the epoch, whatever is accumulated by then, but divides the
    # gradients by the whole number, by which solo-learn multiplies the rates.
    batches = _batches_of_an_epoch(run, images)
    if run.accumulate_grad_batches > max(batches, 1):
        raise ConfigError(
            "accumulate_grad_batches",
            run.accumulate_grad_batches,
            f"an epoch has {batches} {'batch' if batches == 1 else 'batches'} of "
            f"{run.optimizer.batch_size} images per process, and steps end with it",
            f"allowed: 1 to {batches}" if batches > 1 else "allowed: 1",
        )


def tell_of_schedule(run: RunConfig, images: int) -> None:
    """Warns of a schedule of the learning rate that the run ends before, or that it shortens.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> tell_of_schedule(check_run(compose("digits/simclr", ["max_epochs=90"])), images=1000)
    """
    schedule, epochs = run.scheduler, run.max_epochs
    warmup, milestones = schedule.warmup_epochs, schedule.lr_decay_steps or []
    if schedule.name == "step" and milestones and min(milestones) >= epochs:
        logger.warning(
            f"scheduler.lr_decay_steps={milestones} of max_epochs={epochs}: the learning rate "
            "never decays"
        )
    if schedule.name != "warmup_cosine" or not warmup:
        return
    if warmup > epochs:
        logger.warning(
            f"scheduler.warmup_epochs={warmup:g} of max_epochs={epochs}: the learning rate never "
            "reaches optimizer.lr"
        )
    steps = (run.model_extra or {}).get("max_steps") or -1
    batches = _batches_of_an_epoch(run, images)
    lasts = steps / max(math.ceil(batches / run.accumulate_grad_batches), 1)
    shrunk = warmup * lasts / epochs
    if schedule.interval == "step" and 0 < lasts < epochs:
        logger.warning(
            f"max_steps={steps} ends the run after {lasts:.3g} of max_epochs={epochs}: the warm-up "
            f"shrinks alike, from scheduler.warmup_epochs={warmup:g} to {shrunk:.3g}"
        )
