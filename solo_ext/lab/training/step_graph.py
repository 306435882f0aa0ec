"""Training steps that a GPU replays as one CUDA graph.

A graph holds all operations of a step from the crops to the gradients: networks, loss and backward
pass. The host starts it by one call. The optimiser, momentum networks, queues and metrics follow
as without graphs, by a few operations each.

A replay runs no Python, so that everything that a step computes with has to be a tensor that stays
where it is. What changes from epoch to epoch may be anything, because every epoch records its
graphs anew.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

METHODS = frozenset(
    (
        *("debiased", "hard_negative", "metric", "mochi", "nnclr_symmetric", "pcl"),
        *("protocpc", "protoseed", "seed"),
        *("byol", "mocov3", "simclr", "simsiam", "supcon", "swav", "vibcreg"),
    )
)
"""Methods whose replayed steps are tested to be the same to the last bit."""
PRECISIONS = "32-true", "bf16-mixed"
_WARM_UP = 3
"""Optimiser steps before the first graph, in which libraries choose and allocate what they need."""

_NONE = object()
_SPOILS = torch.__version__ < "2.13"
"""Whether a recording that fails leaves generators and memory in it (pytorch pull 180395)."""


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None: ...


class Record(Protocol):
    """Records a step on a device.

    The arguments are the step, the generators that it draws from beside the device's own, and a
    graph that is always replayed before this one, if there is one.
    """

    def __call__(
        self, step: Callable[[], None], generators: Sequence[torch.Generator], after: Any
    ) -> Graph: ...


def records_graphs(run: RunConfig) -> bool:
    """Whether ``performance.graphs`` is asked for and possible; if it is not possible, says why.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["performance.graphs=true", "accelerator=gpu", "precision=bf16-mixed"]
    >>> records_graphs(check_run(compose("digits/simclr", words)))
    True
    """
    if not run.performance.graphs:
        return False
    why = _what_forbids(run)
    if why is not None:
        _say(why)
    return why is None


def _what_forbids(run: RunConfig) -> str | None:
    if run.on_cpu:
        return "this run trains on a CPU, which has no CUDA graphs"
    if run.world_size > 1:
        return "this run trains on several GPUs, which exchange gradients during a step"
    if run.method not in METHODS:
        return f"steps of {run.method} are not tested as graphs"
    if run.knn_eval.enabled:
        return "knn_eval.enabled keeps features of every step"
    if run.precision not in PRECISIONS:
        return f"precision={run.precision} is not tested with graphs ({', '.join(PRECISIONS)} are)"
    return None


def _say(why: str) -> None:
    logger.warning(f"performance.graphs: {why}; the steps run without graphs")


def _cuda_graph(
    step: Callable[[], None],
    generators: Sequence[torch.Generator],
    after: torch.cuda.CUDAGraph | None,
) -> torch.cuda.CUDAGraph:
    """Records the operations of a step, without running them, as a CUDA graph.

    A graph that is replayed after another one uses its memory again: what the other one leaves is
    held, and what this one leaves is read before the other one is replayed.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    for generator in generators:
        graph.register_generator_state(generator)
    pool, collects = None if after is None else after.pool(), gc.isenabled()
    # What is collected may free memory by calls that end a recording.
    gc.disable()
    try:
        # The threads of a loader call CUDA, too, to pin memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
    finally:
        # torch leaves its own stream set if the recording fails.
        torch.cuda.set_stream(stream)
        if collects:
            gc.enable()
    return graph


class _Step(NamedTuple):
    """A training step that is to be done."""

    trainer: pl.Trainer
    pl_module: pl.LightningModule
    step: Callable[[Any, int], Any]
    batch: Any
    batch_idx: int
    first: bool
    """Whether the batch is the first one of an accumulation."""


@dataclass
class _Recorded:
    """A step that was recorded, and what the host sees of it."""

    graph: Graph
    inputs: list[Tensor]
    loss: Tensor
    logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]
    attributes: dict[str, Any]
    """Those that the step sets on the method; tensors among them have new values after a replay."""
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    places: dict[str, int]
    """Addresses of parameters and buffers, until they are compared once."""


class StepGraphs(Callback):
    """Records forward and backward pass of a training step once an epoch, and replays them.

    Numbers are those of steps without graphs. The first steps of an epoch run without: in them
    caches are filled. So does a batch of another size. With accumulation there are two graphs, of
    the batch that sets gradients and of those that add to them. Metrics are logged by Lightning as
    ever, from the values of the replay. If something cannot be recorded, a line says so and the run
    goes on without graphs.

    Args:
        guard: is given method and loss before the backward pass, to register hooks of the loss.
        record: records a step; by default as a CUDA graph.
    """

    def __init__(
        self, guard: Callable[[pl.LightningModule, Tensor], None], record: Record = _cuda_graph
    ) -> None:
        self._guard, self._record = guard, record
        self._recorded: dict[bool, _Recorded] = {}
        """By ``first`` of their steps."""
        self._off = False
        self._of_run = self._of_epoch = 0
        """Optimiser steps of this run, and of this epoch, without graphs."""
        self._shapes: list[torch.Size] | None = None
        self._replayed = False
        """Whether the gradients of this batch are from a replay."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step, backward = pl_module.training_step, pl_module.backward
        zero = pl_module.optimizer_zero_grad
        if getattr(pl_module, "changes_by_step", False):
            self._turn_off("the loss changes from step to step")
            return

        # Lightning looks for the names of the arguments.
        def training_step(batch: Any, batch_idx: int) -> Any:
            first = batch_idx % trainer.accumulate_grad_batches == 0
            recorded = self._of_batch(_Step(trainer, pl_module, step, batch, batch_idx, first))
            self._replayed = recorded is not None
            if recorded is None:
                self._of_run, self._of_epoch = self._of_run + first, self._of_epoch + first
                return step(batch, batch_idx)
            return self._replay(pl_module, recorded, batch)

        def backward_unless_replayed(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._replayed:
                backward(loss, *args, **kwargs)

        def zero_unless_replayed(*args: Any, **kwargs: Any) -> None:
            if not self._replayed:
                zero(*args, **kwargs)

        pl_module.__dict__.update(
            training_step=training_step,
            backward=backward_unless_replayed,
            optimizer_zero_grad=zero_unless_replayed,
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        for name in ("training_step", "backward", "optimizer_zero_grad"):
            pl_module.__dict__.pop(name, None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)

    def _forget(self) -> None:
        """Frees the graphs' memory for what comes between epochs."""
        for recorded in self._recorded.values():
            for parameter, gradient in recorded.gradients:
                if parameter.grad is gradient:
                    parameter.grad = None
        held, self._recorded = bool(self._recorded), {}
        self._of_epoch, self._shapes = 0, None
        if held and torch.cuda.is_available():
            # Other libraries allocate memory of their own.
            torch.cuda.empty_cache()

    def _turn_off(self, why: str) -> None:
        self._off = True
        self._forget()
        _say(why)

    def _of_batch(self, given: _Step) -> _Recorded | None:
        """The recorded step of a batch, recorded now if it is time; ``None`` for one without."""
        if self._off:
            return None
        first = given.first
        shapes = [x.shape for x in tree_flatten(given.batch)[0] if isinstance(x, Tensor)]
        self._shapes = self._shapes or shapes
        # A graph that adds to gradients adds to those of the graph before.
        if shapes != self._shapes or not (first or self._replayed):
            return None
        if first in self._recorded:
            return self._in_place(given.pl_module, self._recorded[first])
        if first and (self._of_run < _WARM_UP or self._of_epoch == 0):
            return None
        try:
            self._recorded[first] = self._recording(given)
        except RuntimeError as error:
            why = f"a step cannot be recorded ({_cause(error)})"
            if _SPOILS and torch.cuda.is_available():
                version = torch.__version__.partition("+")[0]
                problem = f"{why}, after which torch {version} cannot go on"
                remedy = "start again with performance.graphs=false"
                raise ConfigError("performance.graphs", True, problem, remedy) from error
            self._turn_off(why)
            draws = getattr(given.pl_module, "step_draws", None)
            if draws is not None:
                # This step has not drawn yet.
                draws.begin(draws.seed)
            return None
        return self._recorded[first]

    def _in_place(self, pl_module: pl.LightningModule, recorded: _Recorded) -> _Recorded | None:
        """The recorded step, unless what it reads is elsewhere now."""
        places, recorded.places = recorded.places, {}
        now = _places(pl_module) if places else {}
        moved = next((name for name, place in places.items() if now.get(name) != place), None)
        if moved is None:
            return recorded
        self._turn_off(f"every step gives {moved} new memory")
        return None

    def _recording(self, given: _Step) -> _Recorded:
        trainer, pl_module, step, batch, batch_idx, first = given
        leaves, form = tree_flatten(batch)
        held = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        parameters = list(pl_module.parameters())
        log, logged = pl_module.log, list[Any]()
        attributes, buffers = dict(vars(pl_module)), _buffers(pl_module)
        losses: list[Tensor] = []
        self._replayed = False

        def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            value = value.detach().clone() if isinstance(value, Tensor) else value
            logged.append((name, value, args, kwargs))

        def whole_step() -> None:
            loss = step(tree_unflatten(held, form), batch_idx)
            if not isinstance(loss, Tensor):
                raise RuntimeError("its result is no loss")
            losses.append(loss.detach())
            if first:
                pl_module.optimizer_zero_grad(
                    trainer.current_epoch, batch_idx, trainer.optimizers[0]
                )
            scaled = loss / trainer.accumulate_grad_batches
            self._guard(pl_module, scaled)
            with torch.autocast(loss.device.type, enabled=False):
                scaled.backward()  # type: ignore[no-untyped-call]

        after = None if first else self._recorded[True].graph
        pl_module.__dict__["log"] = note
        _detach_attributes(pl_module)
        try:
            graph = self._record(whole_step, list(getattr(pl_module, "step_draws", ())), after)
        finally:
            pl_module.__dict__["log"] = log
            _detach_attributes(pl_module)
        for module, name, buffer in buffers:
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
                raise RuntimeError(f"it replaces a buffer, {name}")
        return _Recorded(
            graph,
            [x for x in held if isinstance(x, Tensor)],
            losses[0],
            logged,
            {k: v for k, v in vars(pl_module).items() if attributes.get(k, _NONE) is not v},
            [(p, p.grad) for p in parameters],
            _places(pl_module),
        )

    def _replay(self, pl_module: pl.LightningModule, recorded: _Recorded, batch: Any) -> Tensor:
        given = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
        torch._foreach_copy_(recorded.inputs, given)
        recorded.graph.replay()
        vars(pl_module).update(recorded.attributes)
        for parameter, gradient in recorded.gradients:
            parameter.grad = gradient
        for name, value, args, kwargs in recorded.logged:
            pl_module.log(name, value, *args, **kwargs)
        return recorded.loss


def _cause(error: BaseException) -> str:
    """What went wrong first, and where: torch then raises an error that names neither."""
    while error.__context__ is not None:
        error = error.__context__
    (place,) = traceback.extract_tb(error.__traceback__)[-1:]
    return f"{first_line(error)}; {Path(place.filename).name}, line {place.lineno}"


def _detach_attributes(root: nn.Module) -> None:
    """Lets tensors that layers keep go on without their history, as weight normalisation's.

    A parameter's part in the history of a step belongs to its stream, and a recording has its own.
    """
    for layer in root.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(layer)[name] = value.detach()


def _places(root: nn.Module) -> dict[str, int]:
    held = [*root.named_parameters(), *root.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in held}


def _buffers(root: nn.Module) -> list[tuple[nn.Module, str, Tensor | None]]:
    return [(m, name, buffer) for m in root.modules() for name, buffer in m._buffers.items()]
