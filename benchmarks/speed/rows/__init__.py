"""The rows of the table, in its order."""

from __future__ import annotations

from benchmarks.speed.rows import (
    augmentation,
    e_step,
    import_cost,
    in_batch,
    mochi,
    nearest,
    proto_nce,
    protocpc,
    queue_loss,
    queue_update,
    sinkhorn,
    training,
)
from benchmarks.speed.target import Row

_ALL: tuple[Row, ...] = (
    queue_loss.ROW,
    nearest.ROW,
    sinkhorn.ROW,
    protocpc.ROW,
    mochi.ROW,
    in_batch.ROW,
    proto_nce.ROW,
    e_step.ROW,
    e_step.CONCENTRATIONS,
    e_step.GRANULARITIES,
    queue_update.ROW,
    queue_update.EMA,
    training.STEPS,
    training.EPOCHS_ROW,
    training.WAITS,
    augmentation.ROW,
    import_cost.ROW,
)
ROWS: dict[str, Row] = {row.name: row for row in _ALL}
