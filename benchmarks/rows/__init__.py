"""The rows, in the order of the table."""

from __future__ import annotations

from benchmarks.operation import of_cases
from benchmarks.record import Row
from benchmarks.rows import (
    augmentation,
    counts,
    e_step,
    embed,
    import_cost,
    in_batch,
    loading,
    mochi,
    nearest,
    proto_nce,
    protocpc,
    queue_loss,
    queue_update,
    scale,
    sinkhorn,
    training,
)

CASES = {
    "queue-loss": queue_loss.CASES,
    "nearest": nearest.CASES,
    "sinkhorn": sinkhorn.CASES,
    "protocpc": protocpc.CASES,
    "mochi": mochi.CASES,
    "in-batch": in_batch.CASES,
    "proto-nce": proto_nce.CASES,
    "e-step": e_step.CASES,
    "e-step-forms": e_step.FORMS,
    "concentrations": e_step.CONCENTRATIONS,
    "queue-update": queue_update.CASES,
    "ema": queue_update.EMA,
    "augmentation": augmentation.CASES,
}
ROWS: dict[str, Row] = {
    **{name: of_cases(*cases) for name, cases in CASES.items()},
    "steps": training.steps,
    "epochs": training.epochs,
    "compiled": training.compiled,
    "graphs": training.graphs,
    "memory": training.memory,
    "counts": counts.measure,
    "loading": loading.measure,
    "embed": embed.measure,
    "scale": scale.measure,
    "import": import_cost.measure,
}
