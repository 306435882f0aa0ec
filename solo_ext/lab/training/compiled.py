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

_CAPTURED_BY = 3
"""Steps after which every network has run, been recorded and replayed once."""


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
        if self.graphs and run.on_cpu:
            logger.warning(
                "performance.graphs: this run trains on a CPU, which has no CUDA graphs; "
                "the networks run as without them"
            )
            self.graphs = False
        self._accumulates = run.accumulate_grad_batches > 1
        self._steps, self._skipped = 0, 0

    def compile(self, model: pl.LightningModule) -> None:
        """Compiles backbone and heads in place, so that checkpoints keep their names."""
        if not (self.compiled or self.graphs):
            return
        # All networks share torch's default limit of 8 kernels; a ninth shape would run uncompiled.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        backend = self.compiled if isinstance(self.compiled, str) else "inductor"
        mode = "reduce-overhead" if self.graphs else None
        for network in model.children():
            if any(True for _ in network.parameters()):
                # Compile each shape separately, so that kernels do not depend on earlier shapes.
                network.compile(dynamic=False, backend=backend, mode=mode)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.graphs:
            return
        self._skipped = _without_graph()
        torch.compiler.set_stance("force_eager")
        if self._accumulates:
            _keep_gradients(pl_module)

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
        skipped = _without_graph() - self._skipped
        if self._steps == _CAPTURED_BY and skipped:
            logger.warning(
                f"performance.graphs: {skipped} of the compiled networks run without a CUDA graph; "
                "TORCH_LOGS=cudagraphs says which and why"
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.graphs:
            # The next run in this process may compile, too.
            torch.compiler.set_stance("default")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")


def _without_graph() -> int:
    """How many networks inductor has compiled in this process and not captured."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["cudagraph_skips"]


def _keep_gradients(model: Any) -> None:
    """Lets gradients be added to tensors that stay, instead of replacing them.

    Otherwise the first gradient of an accumulation is a result of a graph, which the graph's next
    replay overwrites (pytorch issue 169545).
    """

    def zero_grad(epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    model.optimizer_zero_grad = zero_grad
