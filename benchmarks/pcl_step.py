"""What a PCL step and a PCL epoch cost over MoCo v2+'s, on the CPU.

    python benchmarks/pcl_step.py [--json FILE]        # needs CIFAR-10 as cifar10_cpu reads it

Real Trainers, one in a thread of its own per method, take turns: one step, or one epoch, each.
Ratios are of every round, their median is printed. Everything but the method is the same
(configs cifar10_cpu/pcl and cifar10_cpu/mocov2plus, batch 256, one torch thread). A step is
forward, backward, optimiser, momentum, queue and logging, without loading; an epoch is all of it,
E-step, decoding and augmentation included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.config.compose import compose
from solo_ext.training.prepare import prepare
from solo_ext.training.pretrain import pretrain

METHODS = {
    "mocov2plus": ("mocov2plus", []),
    "pcl-weight-0": ("pcl", ["method_kwargs.proto_weight=0"]),
    "pcl": ("pcl", []),
    "pcl-bank": ("pcl", ["method_kwargs.e_step=bank"]),
}
IMAGES = ["data.fraction=0.05", "data.val_path=null", "online_eval.every_n_epochs=0"]
SETTINGS = ["method_kwargs.num_prototypes=[25,62,125]", "method_kwargs.warmup_epochs=0"]
COMMON = ["checkpoint.enabled=false", "loggers=[]", "accelerator=cpu"]


class Turns:
    """Lets one of several threads run at a time, in order.

    Args:
        count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self.condition = threading.Condition()
        self.waiting, self.current = list(range(count)), 0

    def take(self, who: int) -> None:
        """Waits until it is this thread's turn."""
        with self.condition:
            self.condition.wait_for(lambda: self.waiting[self.current] == who)

    def give(self) -> None:
        """Hands over to the next."""
        with self.condition:
            self.current = (self.current + 1) % len(self.waiting)
            self.condition.notify_all()

    def leave(self, who: int) -> None:
        """Takes part no more."""
        with self.condition:
            self.condition.wait_for(lambda: self.waiting[self.current] == who)
            self.waiting.pop(self.current)
            self.current = self.current % len(self.waiting) if self.waiting else 0
            self.condition.notify_all()


class Timer(Callback):
    """Times every step, or every epoch, of a run within its turn."""

    def __init__(self, turns: Turns, who: int, per_epoch: bool) -> None:
        self.turns, self.who, self.per_epoch = turns, who, per_epoch
        self.seconds: list[float] = []

    def _begin(self) -> None:
        # Kept until the next step begins: what lies between, loading, disturbs nobody's.
        if self.seconds:
            self.turns.give()
        self.turns.take(self.who)
        self._start = time.perf_counter()

    def _end(self) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def on_train_epoch_start(self, *_: Any) -> None:
        if self.per_epoch:
            self._begin()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.per_epoch:
            self._end()

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.per_epoch:
            self._begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A step ends with the method's own hook, which comes after the callbacks'."""
        if self.per_epoch:
            return
        own = pl_module.on_train_batch_end

        def own_then_stop(*args: Any) -> None:
            own(*args)
            self._end()

        pl_module.on_train_batch_end = own_then_stop


def race(names: list[str], per_epoch: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every method."""
    turns = Turns(len(names))
    timers = [Timer(turns, who, per_epoch) for who in range(len(names))]
    budget = f"max_epochs={rounds if per_epoch else -(-rounds // 9)}"

    def work(who: int) -> None:
        config, changes = METHODS[names[who]]
        extra = [*SETTINGS, *changes] if config == "pcl" else changes
        run = prepare(compose(f"cifar10_cpu/{config}", [*IMAGES, *extra, *COMMON, budget]))
        with tempfile.TemporaryDirectory() as folder:
            pretrain(run, run_dir=Path(folder), callbacks=[timers[who]], show_progress=False)
        turns.leave(who)

    # Composing and seeding use what threads share: one method after the other starts.
    threads = [threading.Thread(target=work, args=(who,)) for who in range(len(names))]
    for thread in threads:
        thread.start()
        time.sleep(5)
    for thread in threads:
        thread.join()
    return {name: timer.seconds for name, timer in zip(names, timers, strict=True)}


def compare(seconds: dict[str, list[float]], skip: int) -> dict[str, dict[str, float]]:
    """Median seconds, and median ratio to the first method, round by round."""
    names = list(seconds)
    base = seconds[names[0]][skip:]
    return {
        name: {
            "seconds": statistics.median(seconds[name][skip:]),
            "ratio": statistics.median(
                own / other for own, other in zip(seconds[name][skip:], base, strict=True)
            ),
            "rounds": len(base),
        }
        for name in names
    }


def main() -> None:
    """Runs both races and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for label, per_epoch, rounds in (("step", False, args.steps), ("epoch", True, args.epochs)):
        seconds = race(list(METHODS), per_epoch, rounds)
        found[label] = compare(seconds, skip=3 if not per_epoch else 2)
        print(f"{label:8} {'seconds':>9} {'ratio':>7}")
        for name, numbers in found[label].items():
            print(f"  {name:14} {numbers['seconds']:8.3f} {numbers['ratio']:7.3f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
