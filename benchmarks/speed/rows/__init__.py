"""The rows of the table, in its order."""

from __future__ import annotations

from benchmarks.speed.operation import of_cases
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

ROWS: dict[str, Row] = {
    "queue-loss": of_cases(*queue_loss.CASES),
    "nearest": of_cases(*nearest.CASES),
    "sinkhorn": of_cases(*sinkhorn.CASES),
    "protocpc": of_cases(*protocpc.CASES),
    "mochi": of_cases(*mochi.CASES),
    "in-batch": in_batch.measure,
    "proto-nce": of_cases(*proto_nce.CASES),
    "e-step": e_step.e_step,
    "concentrations": of_cases(*e_step.CONCENTRATIONS),
    "granularities": e_step.granularities,
    "queue-update": of_cases(*queue_update.CASES),
    "ema": of_cases(*queue_update.EMA),
    "steps": training.steps,
    "epochs": training.epochs,
    "waits": training.waits,
    "augmentation": augmentation.measure,
    "import": import_cost.measure,
}
