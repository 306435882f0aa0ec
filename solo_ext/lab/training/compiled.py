"""Networks that ``torch.compile`` compiles, and that a GPU replays as CUDA graphs.

A CUDA graph holds all launches of a network, or of its gradients, and starts with one call of the
host. Inductor captures the graphs (``mode="reduce-overhead"``). ``make_graphed_callables`` of torch
would need no compiler, but its networks have one set of buffers: the second view of a step would
overwrite what the gradients of the first still need.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError

logger = logging.getLogger(__name__)

_WHY = "TORCH_LOGS=cudagraphs says which and why"
_CAPTURED_BY = 3
"""Steps after which every network has run, been recorded and replayed once."""
_OFTEN = 20
"""Later steps that record a graph anew, after which a line says so."""


class CompiledNetworks(Callback):
    """Compiles the networks of a run as ``performance.compile`` and ``performance.graphs`` say.

    With graphs, only training steps run compiled: evaluation and E-steps keep results of several
    batches, and the next replay of a graph overwrites its results.

    Raises:
        ConfigError: graphs are asked for with a backend other than inductor.
    """

    def __init__(self, run: RunConfig) -> None:
        self.compiled, self.graphs = run.performance.compile, run.performance.graphs
        if self.graphs and isinstance(self.compiled, str):
            problem = "only inductor captures graphs, and performance.compile names another backend"
            remedy = "set performance.compile=true, or performance.graphs=false"
            raise ConfigError("performance.graphs", True, problem, remedy)
        why = _what_forbids_graphs(run) if self.graphs else None
        if why is not None:
            logger.warning(f"performance.graphs: {why}; the networks run as without them")
            self.graphs = False
        self._accumulates, self._first = run.accumulate_grad_batches > 1, False
        self._steps, self._skipped, self._recorded, self._again = 0, 0, 0, 0

    def compile(self, model: pl.LightningModule) -> None:
        """Compiles backbone and heads in place, so that checkpoints keep their names."""
        if not (self.compiled or self.graphs):
            return
        # All networks share torch's default limit of 8 kernels; a ninth shape would run uncompiled.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        backend = self.compiled if isinstance(self.compiled, str) else "inductor"
        mode = "reduce-overhead" if self.graphs else None
        for name, network in model.named_children():
            # A criterion of `metric` is a loss, though it may have parameters.
            if name != "criterion" and any(True for _ in network.parameters()):
                # Compile each shape separately, so that kernels do not depend on earlier shapes.
                network.compile(dynamic=False, backend=backend, mode=mode)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.graphs:
            return
        # Lightning's sanity validation comes before `on_train_start`.
        self._skipped = _counted("cudagraph_skips")
        torch.compiler.set_stance("force_eager")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.graphs:
            torch.compiler.set_stance("default")
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.graphs:
            return
        torch.compiler.set_stance("force_eager")
        self._steps += 1
        before, self._recorded = self._recorded, _counted("cudagraph_recorded_non_static_inputs")
        self._again += self._steps > _CAPTURED_BY and self._recorded > before
        skipped = _counted("cudagraph_skips") - self._skipped
        if self._steps == _CAPTURED_BY and skipped:
            logger.warning(f"performance.graphs: {skipped} of the graphs are not captured; {_WHY}")
        if self._again == _OFTEN and self._recorded > before:
            logger.warning(
                f"performance.graphs: {_OFTEN} steps have recorded graphs anew, which takes longer "
                f"than none; {_WHY}"
            )

    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        self._first = True

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (self.graphs and self._accumulates and self._first):
            return
        # The first gradients of an accumulation are results of a graph, which its next replay
        # overwrites (pytorch issue 169545). Later ones are added to these copies.
        self._first = False
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.graphs:
            # The next run in this process may compile, too.
            torch.compiler.set_stance("default")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")


def _what_forbids_graphs(run: RunConfig) -> str | None:
    if run.on_cpu:
        return "this run trains on a CPU, which has no CUDA graphs"
    if run.world_size > 1 and (run.model_extra or {}).get("sync_batchnorm"):
        # NCCL may wait for ever when it is ended with graphs that hold its operations.
        return "synchronised batch norm communicates within the networks (sync_batchnorm=true)"
    return None


def _counted(what: str) -> int:
    """A count of inductor's in this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"][what]
