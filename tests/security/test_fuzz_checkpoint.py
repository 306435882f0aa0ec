"""Whatever the bytes of a checkpoint are, it loads or is refused in one line; no code is run."""

from __future__ import annotations

import copy
import io
import json
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.lab.training.resumption import read_state as read_to_resume
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.pretrained.export import export
from solo_ext.pretrained.exported import load_exported
from solo_ext.pretrained.files import read_checkpoint, read_safetensors
from solo_ext.pretrained.runs import load_pretrained
from solo_ext.pretrained.teachers import load_teacher
from tests.lab.training.same_run import train
from tests.security.fuzzing import fuzzed, outcome

TINY = {"channels": [2, 2, 2, 2]}
MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an epoch."""
    config = make_config("simclr", backbone={"kwargs": TINY})
    return train(config, tmp_path_factory.mktemp("fuzz") / "run").run_dir


@pytest.fixture(scope="module")
def whole(run: Path) -> bytes:
    """Its checkpoint."""
    return next(run.glob("*.ckpt")).read_bytes()


@pytest.fixture(scope="module")
def content(whole: bytes) -> dict[str, Any]:
    """What that holds."""
    loaded: dict[str, Any] = torch.load(io.BytesIO(whole), weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def spoiled(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a run directory, whose checkpoint is written anew for every example."""
    folder = tmp_path_factory.mktemp("spoiled")
    shutil.copy(run / "args.json", folder)
    return folder / "run-ep=0.ckpt"


def teacher(layout: Any, model: str) -> Callable[[Path], Any]:
    return lambda file: load_teacher(
        TeacherKwargs(layout=layout, path=str(file), model=model, model_kwargs=TINY)
    )


READERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": read_checkpoint,
    "resume": read_to_resume,
    "run": load_pretrained,
    "run as teacher": lambda file: load_teacher(TeacherKwargs(layout="run", path=str(file))),
    "timm": teacher("timm", "resnet10t"),
    **{layout: teacher(layout, "timm/resnet10t") for layout in ("moco_v2", "swav", "dino")},
}


def read_by_one(data: st.DataObject, file: Path) -> None:
    """One of the readers of checkpoints."""
    name = data.draw(st.sampled_from(list(READERS)))
    event(f"{name}: {outcome(READERS[name], file)}")


SPOILS = st.sampled_from(["cut", "flip", "zero", "overwrite", "insert", "swap", "repeat"])


def torn(data: st.DataObject, content: bytes) -> bytes:
    """Bytes with a few faults."""
    held = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        # Faults in the first and last bytes, where the structure is, as often as elsewhere.
        ends = st.integers(0, min(400, len(held))) | st.integers(
            max(0, len(held) - 2000), len(held)
        )
        place = data.draw(ends | st.integers(0, len(held)))
        match data.draw(SPOILS):
            case "cut":
                del held[place:]
            case "flip" if place < len(held):
                held[place] ^= 1 << data.draw(st.integers(0, 7))
            case "zero":
                stop = min(len(held), place + data.draw(st.integers(1, 64)))
                held[place:stop] = bytes(stop - place)
            case "overwrite":
                new = data.draw(st.binary(min_size=1, max_size=16))
                held[place : place + len(new)] = new
            case "insert":
                held[place:place] = data.draw(st.binary(min_size=1, max_size=16))
            case "swap":
                other = data.draw(st.integers(0, len(held)))
                held[place : place + 8], held[other : other + 8] = (
                    held[other : other + 8],
                    held[place : place + 8],
                )
            case "repeat":
                held += held[place : place + 200]
    return bytes(held)


@fuzzed(25, 2000)
@given(data=st.data())
def test_torn_bytes(data: st.DataObject, whole: bytes, spoiled: Path) -> None:
    spoiled.write_bytes(torn(data, whole))
    read_by_one(data, spoiled)


def rezipped(
    content: bytes, edit: Callable[[dict[str, bytes]], Any], packed: bool = False
) -> bytes:
    """The archive with its entries edited."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    edit(entries)
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, held in entries.items():
            archive.writestr(name, held)
    return out.getvalue()


@fuzzed(25, 2000)
@given(data=st.data())
def test_torn_entries_of_a_whole_archive(data: st.DataObject, whole: bytes, spoiled: Path) -> None:
    """Checksums are right: it is what is in the entries that is not."""

    def edit(entries: dict[str, bytes]) -> None:
        names = sorted(entries)
        pickled = next(n for n in names if n.endswith("data.pkl"))
        name = data.draw(st.just(pickled) | st.sampled_from(names))
        match data.draw(st.sampled_from(["torn", "torn", "gone", "swapped", "renamed", "empty"])):
            case "torn":
                entries[name] = torn(data, entries[name])
            case "gone":
                del entries[name]
            case "swapped":
                other = data.draw(st.sampled_from(names))
                entries[name], entries[other] = entries[other], entries[name]
            case "renamed":
                entries[data.draw(st.sampled_from(["../x", "/x", "x", "archive/../../x"]))] = (
                    entries.pop(name)
                )
            case "empty":
                entries[name] = b""

    spoiled.write_bytes(rezipped(whole, edit, packed=data.draw(st.booleans())))
    read_by_one(data, spoiled)
    assert not (spoiled.parent / "x").exists()
    assert not (spoiled.parent.parent / "x").exists()


ODD_TENSORS: list[Callable[[], Any]] = [
    lambda: torch.zeros(0),
    lambda: torch.zeros(()),
    lambda: torch.zeros(1, device="meta"),
    lambda: torch.zeros(2, dtype=torch.complex64),
    lambda: torch.full((3,), float("nan")),
    lambda: torch.zeros(3, dtype=torch.bool),
    lambda: torch.zeros(1).expand(10**12),
    lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
    lambda: torch.nn.Parameter(torch.zeros(2)),
    lambda: torch.zeros(2).half(),
]
ODD_WEIGHTS: list[Callable[[Tensor], Tensor]] = [
    lambda weight: weight.to("meta"),
    lambda weight: weight.to_sparse(),
    lambda weight: weight.to(torch.complex64),
    lambda weight: torch.zeros(()).expand(weight.shape),
    lambda weight: weight[..., None],
]
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([[], {}, (), set(), OrderedDict(), b"x", torch.float32, torch.Size([1])]).map(
        copy.deepcopy
    )
    | st.sampled_from(ODD_TENSORS).map(lambda make: make())
)
TREES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)


@fuzzed(40, 2000)
@given(data=st.data())
def test_wrong_things_in_the_right_places(
    data: st.DataObject, content: dict[str, Any], spoiled: Path
) -> None:
    held = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        weights = held.get("state_dict")
        inside = isinstance(weights, dict) and weights and data.draw(st.booleans())
        place = weights if inside else held
        if not place:
            continue
        key = data.draw(st.sampled_from(list(place)))
        match data.draw(
            st.sampled_from(["replace", "replace", "remove", "rename", "odd weight", "swap"])
        ):
            case "replace":
                place[key] = data.draw(TREES)
            case "remove":
                del place[key]
            case "rename":
                place[data.draw(st.text(max_size=4) | st.integers() | st.none())] = place.pop(key)
            case "odd weight" if isinstance(place[key], Tensor):
                place[key] = data.draw(st.sampled_from(ODD_WEIGHTS))(place[key])
            case "swap":
                other = data.draw(st.sampled_from(list(place)))
                place[key], place[other] = place[other], place[key]
    torch.save(held, spoiled)
    read_by_one(data, spoiled)


def test_archives_that_unpack_to_gigabytes(whole: bytes, spoiled: Path) -> None:
    """A pickle of 2 GB of zeros, packed into 2 MB, is refused before it is unpacked."""

    def edit(entries: dict[str, bytes]) -> None:
        name = next(n for n in entries if n.endswith("data.pkl"))
        entries[name] = bytes(2**28) + entries[name]

    spoiled.write_bytes(rezipped(whole, edit, packed=True))
    with pytest.raises(UserError, match="is compressed, which torch"):
        read_checkpoint(spoiled)


def test_entries_that_lie_over_each_other(whole: bytes, spoiled: Path) -> None:
    """The directory lists one large entry a thousand times."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        largest = max(archive.infolist(), key=lambda e: e.file_size)
        start = archive.start_dir
    header = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\x01\x02", 0, 0, 0, 0, 0, 0),
        *(largest.CRC, largest.file_size, largest.file_size),
        *(len(largest.filename), 0, 0, 0, 0),
        *(0, largest.header_offset),
    )
    count = 1000
    directory = (header + largest.filename.encode()) * count
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
    spoiled.write_bytes(whole[:start] + directory + end)
    with pytest.raises(UserError, match="its entries overlap"):
        read_checkpoint(spoiled)


def read_as_export(file: Path) -> None:
    event(f"export: {outcome(load_exported, file)}")
    event(f"safetensors: {outcome(read_safetensors, file)}")


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("exported") / "model.safetensors"
    export(run, "safetensors", file)
    return file.read_bytes()


@fuzzed(40, 2000)
@given(data=st.data())
def test_torn_exports(data: st.DataObject, exported: bytes, tmp_path: Path) -> None:
    file = tmp_path / "torn.safetensors"
    file.write_bytes(torn(data, exported))
    read_as_export(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@fuzzed(40, 2000)
@given(data=st.data())
def test_exports_that_say_something_else(
    data: st.DataObject, exported: bytes, tmp_path: Path
) -> None:
    length = struct.unpack("<Q", exported[:8])[0]
    header = json.loads(exported[8 : 8 + length])
    about = json.loads(header["__metadata__"]["solo_ext"])
    match data.draw(st.sampled_from(["header", "tensor", "metadata", "about"])):
        case "header":
            header[data.draw(st.sampled_from(list(header)))] = data.draw(JSON)
        case "tensor":
            name = data.draw(st.sampled_from([k for k in header if k != "__metadata__"]))
            header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = (
                data.draw(
                    JSON | st.sampled_from(["F64", "BF16", "F8_E4M3", "I64", [2**62], [0, 2**60]])
                )
            )
        case "metadata":
            header["__metadata__"] = data.draw(JSON)
        case "about":
            place = about if data.draw(st.booleans()) else about["backbone"]
            place[data.draw(st.sampled_from(list(place)))] = data.draw(JSON)
            header["__metadata__"]["solo_ext"] = json.dumps(about)
    text = json.dumps(header).encode()
    file = tmp_path / "said.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + exported[8 + length :])
    read_as_export(file)
