"""A pickle that runs code is refused by whatever reads files, also where torch is told to trust.

``mark`` fails a test in which the code was run.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from solo_ext.config.schema import HuggingFace
from solo_ext.core.errors import UserError
from solo_ext.lab.cli.main import main
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.features import FeatureStore
from solo_ext.lab.experiments.records import RECORDS, read_records
from solo_ext.lab.experiments.results import read_results
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import CONFIG, METRICS, read_config
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.pretrained.exported import load_exported
from solo_ext.pretrained.files import read_checkpoint, read_safetensors
from solo_ext.pretrained.teachers import load_teacher
from tests.data.making import opened, png, refused, tar_of
from tests.lab.training.same_run import train
from tests.security.conftest import Payload

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing says ``weights_only``, torch now runs what is in a file."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture(scope="module")
def trained(
    make_config: MakeConfig, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run directory of an epoch."""
    config = make_config("simclr", data={"val_path": str(images)})
    return train(config, tmp_path_factory.mktemp("trained") / "run").run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def checkpoint_of(run: Path) -> Path:
    (found,) = run.glob("*.ckpt")
    return found


def poison(file: Path, payload: Payload, **kwargs: Any) -> None:
    """Puts the payload into an otherwise whole checkpoint."""
    state = torch.load(file, weights_only=True)
    state["hyper_parameters"] = payload
    torch.save(state, file, **kwargs)


def test_the_payload_works(payload: Payload, mark: Path, tmp_path: Path) -> None:
    """Read without care, it runs: by pickle, and by torch as it is set here."""
    pickle.loads(pickle.dumps(payload))
    assert mark.exists()
    mark.unlink()
    torch.save({"a": payload}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt")
    assert mark.exists()
    mark.unlink()


@pytest.mark.parametrize(("zipped", "protocol"), [(True, 2), (False, 4)])
def test_checkpoint(payload: Payload, tmp_path: Path, zipped: bool, protocol: int) -> None:
    file = tmp_path / "a.ckpt"
    how = {"_use_new_zipfile_serialization": zipped, "pickle_protocol": protocol}
    torch.save({"state_dict": payload}, file, **how)
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(file)


def test_resume(run: Path, payload: Payload) -> None:
    config = read_config(run)
    (run / CONFIG).write_text(yaml.safe_dump({**config, "max_epochs": 2}))
    poison(checkpoint_of(run), payload)
    before = (run / METRICS).read_text()
    with pytest.raises(UserError, match="read"):
        resume(run)
    assert (run / METRICS).read_text() == before


def test_resume_from_checkpoint(
    run: Path, payload: Payload, make_config: MakeConfig, tmp_path: Path
) -> None:
    file = checkpoint_of(run)
    poison(file, payload)
    config = make_config("simclr", max_epochs=2, resume_from_checkpoint=str(file))
    with pytest.raises(UserError, match="cannot be read"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_lightnings_own_way_of_resuming(
    run: Path,
    payload: Payload,
    make_config: MakeConfig,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under SLURM Lightning looks for a checkpoint of its own in the run directory."""
    checkpoint_of(run).rename(run / "hpc_ckpt_1.ckpt")
    poison(run / "hpc_ckpt_1.ckpt", payload)
    for name, value in {"NTASKS": "1", "JOB_NAME": "job", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    config = make_config("simclr", data={"val_path": str(images)})
    with pytest.raises((UserError, pickle.UnpicklingError)):
        train(config, run)


def test_a_checkpoint_names_nothing_to_instantiate(package: str, run: Path) -> None:
    """GHSA-qqmf-gpg7-g8gw: a text in ``hyper_parameters``, which is no pickled code."""
    file = checkpoint_of(run)
    state = torch.load(file, weights_only=True)
    named = {"_instantiator": f"{package}.call", "_class_path": f"{package}.call", "a": 1}
    state |= {"hyper_parameters": named, "datamodule_hyper_parameters": named}
    torch.save({**state, "hparams_name": "cfg"}, file)
    assert evaluate(str(run), "knn", {"device": "cpu", "k": [1]})["results"]
    resume(run)


@pytest.mark.parametrize(
    "words", [("eval", "knn"), ("eval", "suite"), ("export", "--format", "timm")], ids=" ".join
)
def test_commands_on_a_run(
    words: tuple[str, ...], run: Path, payload: Payload, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(checkpoint_of(run), payload)
    assert main([*words, str(run)]) == 2
    said = capsys.readouterr().err
    assert "it holds exec, which is code and not run" in said


@pytest.mark.parametrize("layout", ["run", "moco_v2", "swav", "dino", "timm", "torchvision"])
@pytest.mark.parametrize("wrapper", ["state_dict", "args"])
def test_teachers(layout: Any, wrapper: str, run: Path, payload: Payload) -> None:
    file = checkpoint_of(run)
    torch.save({wrapper: payload}, file)
    model = {"timm": "resnet10t", "torchvision": "resnet18"}.get(layout)
    with pytest.raises(UserError, match=r"it holds exec, which is code and not run"):
        load_teacher(TeacherKwargs(layout=layout, path=str(file), model=model))


def test_weights_for_a_backbone_of_timm(
    payload: Payload, make_config: MakeConfig, tmp_path: Path
) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"state_dict": payload}, file)
    for argument in (
        {"checkpoint_path": str(file)},
        {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file)}},
        {"pretrained": True, "pretrained_cfg": {"file": str(file)}},
    ):
        config = make_config("simclr", backbone={"kwargs": {"small_stem": False, **argument}})
        # Where it is not refused before, the run itself fails.
        with pytest.raises(Exception, match=r"Weights only load failed|weights_only=True blocked"):
            train(config, tmp_path / "new")


def test_a_run_names_no_other_file_of_weights(run: Path, payload: Payload, tmp_path: Path) -> None:
    """Its args.json comes from whoever made it; the weights are those of the checkpoint."""
    file = tmp_path / "weights.pth"
    torch.save({"state_dict": payload}, file)
    args = json.loads((run / "args.json").read_text())
    args["backbone"]["kwargs"] |= {"checkpoint_path": str(file), "pretrained": True}
    (run / "args.json").write_text(json.dumps(args))
    record = evaluate(str(run), "knn", {"device": "cpu", "k": [1]})
    assert record["results"]


def test_files_that_are_no_safetensors(payload: Payload, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (pickle.dumps(payload), _saved({"a": payload})):
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            load_exported(file)
        with pytest.raises(UserError, match="cannot be read"):
            read_safetensors(file)


def _saved(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def test_stored_features(payload: Payload, tmp_path: Path) -> None:
    rows = torch.arange(6.0).reshape(2, 3)

    def extract(indices: Any) -> Any:
        yield rows[list(indices)], torch.tensor(list(indices))

    store = FeatureStore(tmp_path / "features", {}, 2)
    store.features(extract)
    (file,) = (tmp_path / "features").rglob("*.safetensors")
    file.write_bytes(_saved({"features": payload}))
    assert torch.equal(store.features(extract)[0], rows)


def test_unfinished_fine_tuning(run: Path, payload: Payload) -> None:
    settings = {"device": "cpu", "epochs": 1, "batch_size": 16}
    evaluate(str(run), "finetune", settings)
    kept: list[Path] = []
    held = torch.save

    def save(state: Any, file: Any, **kwargs: Any) -> None:
        kept.append(Path(file))
        held({"epochs": 1, "model": payload}, file, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        evaluate(str(run), "finetune", settings)
    # What the second left, with code in it, the third passes over.
    assert kept
    assert list(run.glob(".unfinished-*.pt"))
    assert evaluate(str(run), "finetune", settings)["results"]


def test_records(payload: Payload, tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_bytes(pickle.dumps(payload, protocol=0) + b"\n")
    with pytest.raises(UserError, match="not a record"):
        read_records(tmp_path)
    (tmp_path / RECORDS).write_text("")
    (tmp_path / "benchmark.yaml").write_text("title: !!python/object/apply:os.system [true]\n")
    with pytest.raises(UserError, match="not YAML: could not determine a constructor"):
        read_results(tmp_path)


def test_torchvisions_archives(payload: Payload, tmp_path: Path) -> None:
    """CIFAR's files are pickles; those whose checksums are not the published ones are not read."""
    for dataset, folder, files in (
        (
            "cifar10",
            "cifar-10-batches-py",
            [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"],
        ),
        ("cifar100", "cifar-100-python", ["train", "test", "meta"]),
    ):
        place = tmp_path / dataset / folder
        place.mkdir(parents=True)
        for name in files:
            (place / name).write_bytes(pickle.dumps(payload))
        refused("is not there", place.parent, dataset=dataset)


def test_hdf5(payload: Payload, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "images.h5"
    with h5py.File(file, "w") as content:
        group = content.create_group("class0")
        group["0.png"] = np.frombuffer(pickle.dumps(payload), dtype=np.uint8)
        group["1.png"] = np.void(pickle.dumps(payload))
        group.create_dataset(
            "2.png", data=[pickle.dumps(payload, protocol=0)], dtype=h5py.string_dtype()
        )
    images = opened(file, format="h5")
    assert len(images) == 3
    for index in range(3):
        with pytest.raises(UserError):
            images[index]


@pytest.mark.parametrize("kind", ["pickle", "script", "webdataset", "arrow", "state"])
def test_hugging_face(
    kind: str, payload: Payload, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "some_data"
    folder.mkdir()
    path = folder
    match kind:
        case "pickle":
            (folder / "train.pkl").write_bytes(pickle.dumps(payload))
            (folder / "train.pickle").write_bytes(pickle.dumps(payload))
        case "script":
            (folder / "some_data.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        case "webdataset":
            kinds = ("pkl", "pyd", "pickle", "pth", "npy")
            others = [(f"0.{kind}", pickle.dumps(payload)) for kind in kinds]
            tar_of(folder / "train.tar", ("0.png", png(1)), *others)
        case "arrow":
            path = _arrow_with_a_pickled_type(folder, payload)
        case "state":
            (folder / "state.json").write_bytes(pickle.dumps(payload, protocol=0))
            (folder / "dataset_info.json").write_bytes(pickle.dumps(payload, protocol=0))
    with pytest.raises(UserError):
        _open_by_datasets(path, tmp_path)


def _open_by_datasets(path: Path, tmp_path: Path) -> Any:
    pytest.importorskip("datasets")
    cache = HuggingFace(cache_dir=str(tmp_path / "cache"))
    return opened(path, format="huggingface", huggingface=cache)


def _arrow_with_a_pickled_type(folder: Path, payload: Payload) -> Path:
    """A type that Arrow once read by unpickling it (CVE-2023-47248)."""
    import pyarrow as pa

    about = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(payload),
    }
    field = pa.field("image", pa.binary(), metadata=about)
    table = pa.table([pa.array([png(1)])], schema=pa.schema([field]))
    file = folder / "train.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return file


@pytest.mark.parametrize("kind", ["zip", "tar", "link"])
def test_archives_cannot_leave_their_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members named ``../..``, absolute ones, and links to a folder outside."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outside, folder = tmp_path / "outside", tmp_path / "archives"
    outside.mkdir()
    folder.mkdir()
    names = [f"{'../' * depth}outside/planted.png" for depth in range(1, 12)]
    names += [str(outside / "planted.png"), "cat/0.png", "dog/1.png"]
    if kind == "zip":
        with zipfile.ZipFile(folder / "train.zip", "w") as packed:
            for name in names:
                packed.writestr(name, png(1))
    else:
        with tarfile.open(folder / "train.tar.gz", "w:gz") as archive:
            if kind == "link":
                link = tarfile.TarInfo("way")
                link.type, link.linkname = tarfile.SYMTYPE, str(outside)
                archive.addfile(link)
                names = ["way/planted.png", "cat/0.png"]
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = len(png(1))
                archive.addfile(info, io.BytesIO(png(1)))
    # That it is refused as a whole is as good.
    with contextlib.suppress(UserError):
        len(_open_by_datasets(folder, tmp_path))
    assert not list(outside.iterdir())
