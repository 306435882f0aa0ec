"""Configs drawn from the schema, some values mutated: each one trains, or is refused in one line.

ATTACK_CONFIGS=20000 pytest -m matrix tests/attack/test_configs.py draws so many, other ones each
time, and adds lines to a record as it goes: it may be stopped, and what several starts have drawn
adds up. One in ten of those that are accepted also trains for a step. They are tried in a process
apart, with limits of time and memory; one that fails is told, and the others go on.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import re
import resource
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Union, get_args

import pytest
import timm
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LambdaCallback
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from solo_ext.config.check import _run_model
from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.methods import METHODS, load_all
from tests.attack.world import Outcomes
from tests.attack.world import settings as tiny_run
from tests.conftest import DISTILLATION, made_images

load_all()
CONFIGS = int(os.environ.get("ATTACK_CONFIGS", 0))
BATCH = 250
"""Configs of one line of the record."""
SECONDS, MEMORY = 300, 12 << 30
"""What one config may take; without a limit the system would kill the tests instead."""
TRAINED, ACCEPTED, REFUSED, LATE = "trained", "accepted", "refused", "refused by the first step"
NO_MEMORY = "out of memory"
METHOD_NAMES = sorted(METHODS)
Path_ = tuple[str, ...]
End = tuple[str, str]
"""How a config ends, and what is said of it."""
NEVER = {
    # They reach for a network, a package that may be missing, or every core.
    *(("wandb", "enabled"), ("devices",), ("num_nodes",), ("data", "num_workers")),
    *(("data", "format"), ("data", "dataset"), ("accelerator",), ("plugins",)),
}


def fields(kind: type[BaseModel], at: Path_ = ()) -> Iterator[tuple[Path_, FieldInfo]]:
    """Every key of the schema, those of sections too."""
    for name, info in kind.model_fields.items():
        path = (*at, name)
        if path in NEVER:
            continue
        yield path, info
        for section in sections(info.annotation):
            yield from fields(section, path)


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections(inner)]


def schema(method: str) -> dict[Path_, FieldInfo]:
    own = fields(METHODS[method].target.kwargs_type, ("method_kwargs",))
    return {**dict(fields(_run_model())), **dict(own)}


ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 3, 10**6, 2**31, 10**30),
        *(0.0, 0.5, 1.0, -0.5, 1e-45, 1e38, 1e300, float("inf"), float("nan")),
        *("", "auto", "a b", "0", "../x", "\N{SNOWMAN}", "~", "${x}", "x" * 300, "a\0b"),
        *([], [1], [0.5, 0.5], {}, {"a": 1}, [[]], [None]),
    ]
)


def values(info: FieldInfo) -> st.SearchStrategy[Any]:
    """Values of the key's own type with its bounds where that can be drawn, odd ones, a default."""
    kinds = [ODD, st.integers(-3, 70) | st.floats(-1, 3)]
    if not info.is_required():
        kinds.append(st.just(info.get_default(call_default_factory=True)))
    if not sections(info.annotation) and "Any" not in str(info.annotation):
        annotated = Union[info.annotation]  # noqa: UP007
        kinds += [st.from_type(annotated)] * 3
    return st.one_of(kinds)


def put(config: dict[str, Any], path: Path_, value: Any) -> None:
    """Sets a key; sections that are not there are made, a list gets it in its first entry."""
    here: Any = config
    for name in path[:-1]:
        inner = here.get(name)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict):
            inner = here[name] = {}
        here = inner
    here[path[-1]] = value.model_dump() if isinstance(value, BaseModel) else value


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[Path_, Any]]:
    method = draw(st.sampled_from(METHOD_NAMES))
    known = SCHEMAS[method]
    paths = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True))
    return method, {path: draw(values(known[path])) for path in paths}


SCHEMAS = {name: schema(name) for name in METHOD_NAMES}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    network = timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0)
    torch.save(network.state_dict(), folder / "teacher.pt")
    return made_images(folder / "images")


def base(method: str, images: Path) -> dict[str, Any]:
    """A tiny run of a method that is valid."""
    config = tiny_run(images, method)
    if method in DISTILLATION:
        teacher = {"layout": "timm", "path": str(images.parent / "teacher.pt")}
        teacher |= {"model": "resnet10t", "model_kwargs": {"channels": [8, 8, 8, 8]}}
        config["method_kwargs"] |= {"teacher": teacher, "head": "mlp"}
    return config | {"max_steps": 1, "checkpoint": {"enabled": False}}


@pytest.mark.matrix
@pytest.mark.ci
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_bases_are_valid(method: str, images: Path, tmp_path: Path) -> None:
    result = pretrain(prepare(base(method, images)), run_dir=tmp_path / "run", show_progress=False)
    assert result.epochs <= 1


@pytest.fixture
def outcomes() -> Iterator[Outcomes]:
    found = Outcomes("configs", BATCH, kept=CONFIGS > 0)
    yield found
    found.write()


class Worker:
    """A process that tries one config after the other; if one hangs or ends it, the next is new.

    Args:
        folder: for what configs write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.ours, its = fork.Pipe()
        self.process = fork.Process(target=work, args=(its, self.ours, self.folder))
        self.process.start()
        its.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.ours.close()

    def outcome(self, config: Mapping[str, Any], train: bool) -> End:
        """How a config ends, and what is said of it."""
        self.ours.send((config, train))
        end, deadline = ("hangs", ""), time.monotonic() + SECONDS
        while self.ours.poll(max(0.0, deadline - time.monotonic())):
            try:
                end, last = self.ours.recv()
            except EOFError:
                self.process.join()
                end = ("dies", f"exit code {self.process.exitcode}")
                break
            if last:
                return end
        self.stop()
        self.start()
        return end


def work(here: Connection, there: Connection, folder: Path) -> None:
    """Answers each config with how it ends; before that, once a step is trained."""
    # Otherwise this process would not notice that the other one has gone.
    there.close()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    tempfile.tempdir = str(folder)
    with contextlib.suppress(EOFError):
        while True:
            config, train = here.recv()
            with tempfile.TemporaryDirectory() as place:
                os.chdir(place)
                step = LambdaCallback(
                    on_train_batch_end=lambda *_: here.send(((TRAINED, ""), False))
                )
                kind, said = attempt(config, Path(place) / "run", [step] if train else None)
                left = os.listdir(place)
                if left and kind in (REFUSED, LATE):
                    kind, said = "leaves", f"{left}: {said}"
            here.send(((kind, said), True))


def attempt(config: Mapping[str, Any], run_dir: Path, callbacks: list[Any] | None) -> End:
    try:
        prepared = prepare(config)
        if callbacks is None:
            return ACCEPTED, ""
        pretrain(prepared, run_dir=run_dir, callbacks=callbacks, show_progress=False)
        return TRAINED, ""
    except UserError as error:
        late = re.search("first step|cannot be built", str(error))
        one = len(str(error).splitlines()) == 1
        return LATE if late else REFUSED if one else "several lines", str(error)
    except Exception as error:
        # A config may ask for more memory than there is; the command says so in one line.
        memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return NO_MEMORY if memory else "fails", traceback.format_exc(limit=-4)


@pytest.mark.matrix
@pytest.mark.ci
@pytest.mark.timeout(0 if CONFIGS else 600)
def test_every_config_trains_or_is_refused(
    images: Path, outcomes: Outcomes, tmp_path: Path
) -> None:
    # What libraries import and set up when they are first used is there for all.
    pretrain(prepare(base("pcl", images)), run_dir=tmp_path / "first", show_progress=False)
    worker = Worker(tmp_path)

    @settings(
        max_examples=CONFIGS or 60,
        derandomize=not CONFIGS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(drawn=configs(), trained=st.integers(0, 9))
    def attack(drawn: tuple[str, dict[Path_, Any]], trained: int) -> None:
        method, changes = drawn
        config = copy.deepcopy(base(method, images))
        for path, value in changes.items():
            put(config, path, value)
        end, said = worker.outcome(config, trained == 0)
        if end not in (TRAINED, ACCEPTED, REFUSED, LATE, NO_MEMORY):
            outcomes.failures.append(f"{drawn} {end}: {said.strip().splitlines()[-1:]}")
        if end not in (TRAINED, ACCEPTED, REFUSED):
            # A value that only the first step refuses is a gap in the schema, but no traceback.
            print(drawn, end, said, flush=True)
        outcomes.add(outcomes=[end])

    try:
        attack()
    finally:
        worker.stop()
    failures = outcomes.failures
    assert not failures, f"{len(failures)} configs failed, the first:\n{failures[0]}"
