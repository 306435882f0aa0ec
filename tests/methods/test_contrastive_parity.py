"""Without what sets them apart, the contrastive methods and PCL are the host's, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

Train = Callable[..., dict[str, float]]
State = dict[str, Tensor]
STATE = ("queues.", "support_set.", "prototypes.")


class Same(Callback):
    """Starts a run of ours from the weights and queues that the host's started from."""

    def __init__(self) -> None:
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
        for view, queue in enumerate(method.queues):
            queue.value.copy_(self.start["queue"][view].T)
        if getattr(method, "support_set", None) is not None:
            method.support_set.value.copy_(self.start["queue"])

    def on_train_batch_end(self, trainer: Any, method: Any, outputs: Any, *_: Any) -> None:
        self.losses[-1].append(float(outputs["loss"]))


NO_MIXES = {"num_pair_mixes": 0, "num_query_mixes": 0, "num_hard": 12}
MOCO = {"negatives": "queue", "queue_size": 48, "tau_plus": 0.0, "beta": 0.0}
ONE_WAY = {"symmetric": False, "support_set": {"size": 48}}
PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("mocov2plus", "mochi", {"mixing": NO_MIXES, "proj_batch_norm": False}),
    ("mocov2plus", "hard_negative", {**MOCO, "proj_batch_norm": False}),
    ("nnclr", "nnclr_symmetric", ONE_WAY),
    ("simclr", "debiased", {"tau_plus": 0.0, "proj_batch_norm": False}),
    ("mocov2plus", "pcl", {"proto_weight": 0.0, "symmetric": True}),
]


@pytest.mark.parametrize(("host", "name", "kwargs"), PAIRS)
def test_losses_are_the_host_s(train: Train, host: str, name: str, kwargs: dict[str, Any]) -> None:
    same = Same()
    for method, settings in ((host, {}), (name, kwargs)):
        settings = {"temperature": 0.2, **settings}
        train(method, same, method_kwargs=settings, optimizer={"lr": 0.03}, max_epochs=2)
    theirs, ours = same.losses
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len({round(loss, 3) for loss in ours}) > 2
