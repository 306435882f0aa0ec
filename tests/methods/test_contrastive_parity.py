"""Without what sets them apart, the contrastive methods and PCL are the host's, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

Train = Callable[..., dict[str, float]]
State = dict[str, Tensor]
STATE = ("queues.", "support_set.", "prototypes.")


class Same(Callback):
    """Starts a run of ours from the weights and queues that the host's started from."""

    def __init__(self, take_queue: Callable[[Any, State], None]) -> None:
        self.take_queue = take_queue
        self.start: State = {}
        self.losses: list[list[float]] = []

    def on_train_start(self, trainer: Any, method: Any) -> None:
        self.losses.append([])
        state = method.state_dict()
        if not self.start:
            self.start = {k: v.clone() for k, v in state.items()}
            return
        shared = {k: v for k, v in self.start.items() if k in state}
        left = {k for k in self.start.keys() - shared.keys() if not k.startswith("queue")}
        # Batch norm takes a bias before it away again; ours has none there.
        assert all(k.startswith(("projector.", "predictor.")) and k.endswith("bias") for k in left)
        assert all(k in shared or k.startswith(STATE) for k in state)
        method.load_state_dict(state | shared)
        self.take_queue(method, self.start)

    def on_train_batch_end(self, trainer: Any, method: Any, outputs: Any, *_: Any) -> None:
        self.losses[-1].append(float(outputs["loss"]))


def moco_queues(method: Any, start: State) -> None:
    for view, queue in enumerate(method.queues):
        queue.value.copy_(start["queue"][view].T)


def nnclr_queue(method: Any, start: State) -> None:
    method.support_set.value.copy_(start["queue"])


def no_queue(method: Any, start: State) -> None:
    assert not len(method.queues)


class Pair(NamedTuple):
    host: str
    ours: str
    kwargs: dict[str, Any]
    take_queue: Callable[[Any, State], None]


NO_MIXES = {"num_pair_mixes": 0, "num_query_mixes": 0, "num_hard": 12}
PAIRS = {
    "mochi": Pair("mocov2plus", "mochi", {"mixing": NO_MIXES}, moco_queues),
    "hard_negative": Pair(
        "mocov2plus",
        "hard_negative",
        {"negatives": "queue", "queue_size": 48, "tau_plus": 0.0, "beta": 0.0},
        moco_queues,
    ),
    "nnclr_symmetric": Pair(
        "nnclr", "nnclr_symmetric", {"symmetric": False, "support_set": {"size": 48}}, nnclr_queue
    ),
    "debiased": Pair("simclr", "debiased", {"tau_plus": 0.0}, no_queue),
    "pcl": Pair("mocov2plus", "pcl", {"proto_weight": 0.0, "symmetric": True}, moco_queues),
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_are_the_host_s(train: Train, name: str) -> None:
    pair = PAIRS[name]
    same = Same(pair.take_queue)
    batch_norm = {} if name in ("nnclr_symmetric", "pcl") else {"proj_batch_norm": False}
    for method, kwargs in ((pair.host, {}), (pair.ours, {**pair.kwargs, **batch_norm})):
        train(
            method,
            same,
            method_kwargs={"temperature": 0.2, **kwargs},
            optimizer={"lr": 0.03},
            max_epochs=4,
        )
    theirs, ours = same.losses
    assert len(ours) == 8
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len({round(loss, 3) for loss in ours}) > 4
